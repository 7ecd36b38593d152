#!/usr/bin/env bash
# PPO with a critic on mathematics, Qwen2-7B-Instruct, 8 GPUs, Megatron tensor and pipeline parallelism.
# Without megatron-core it stops with one line when it starts; strategy=fsdp2 and no megatron_config run the same on FSDP2.
set -euo pipefail

python3 -m valor.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/math/train.parquet" \
    data.val_files="$HOME/data/math/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron_config.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    critic.strategy=megatron \
    critic.megatron_config.tensor_model_parallel_size=4 \
    critic.optim.lr=1e-5 \
    trainer.project_name=valor_ppo_math \
    trainer.experiment_name=qwen2_7b_megatron \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 \
    "$@"
