#!/usr/bin/env bash
# GRPO on GSM8K, Qwen2.5-0.5B-Instruct, one GPU; the preset supplies five samples a prompt and the KL loss.
set -euo pipefail

python3 -m valor.trainer.main_ppo --config-name grpo_config \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=128 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    trainer.project_name=valor_grpo_gsm8k \
    trainer.experiment_name=qwen2_5_0_5b \
    trainer.n_gpus_per_node=1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
