#!/usr/bin/env bash
# PPO with a critic on GSM8K, DeepSeek-LLM-7B-chat, 8 GPUs with vLLM (pip install 'valor-rl[vllm]').
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

python3 -m valor.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat \
    critic.model.use_remove_padding=true \
    critic.model.enable_gradient_checkpointing=true \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=32 \
    trainer.project_name=valor_ppo_gsm8k \
    trainer.experiment_name=deepseek_llm_7b \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=1 \
    trainer.total_epochs=15 \
    "$@"
