#!/usr/bin/env bash
# PPO with a critic on GSM8K, Gemma-2-2B-it, 2 GPUs. Further arguments are overrides:
#   bash examples/ppo_trainer/run_gemma.sh trainer.n_gpus_per_node=4 actor_rollout_ref.actor.optim.lr=5e-7
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

python3 -m valor.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path=google/gemma-2-2b-it \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    critic.model.path=google/gemma-2-2b-it \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    trainer.project_name=valor_ppo_gsm8k \
    trainer.experiment_name=gemma2_2b_it \
    trainer.n_gpus_per_node=2 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs=15 \
    "$@"
