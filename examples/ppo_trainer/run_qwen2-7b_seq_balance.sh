#!/usr/bin/env bash
# PPO with a critic on GSM8K, Qwen2-7B-Instruct, 8 GPUs, micro-batches by tokens: sequences are balanced over GPUs and
# micro-batches by their lengths, whatever mixture of long and short responses a step brings.
set -euo pipefail

python3 -m valor.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    critic.model.path=Qwen/Qwen2-7B-Instruct \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=48000 \
    trainer.project_name=valor_ppo_gsm8k \
    trainer.experiment_name=qwen2_7b_seq_balance \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
