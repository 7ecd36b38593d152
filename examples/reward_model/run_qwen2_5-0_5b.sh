#!/usr/bin/env bash
# A reward model from UltraFeedback's preference pairs (valor data prepare ultrafeedback), Qwen2.5-0.5B-Instruct, 1 GPU.
set -euo pipefail

python3 -m valor rm train \
    model.path=Qwen/Qwen2.5-0.5B-Instruct \
    data.train_files="$HOME/data/ultrafeedback/train.parquet" \
    data.val_files="$HOME/data/ultrafeedback/test.parquet" \
    data.max_length=2048 \
    data.train_batch_size=128 \
    optim.lr=1e-5 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.05 \
    loss.center_coef=0.01 \
    trainer.project_name=valor_rm \
    trainer.experiment_name=qwen2_5_0_5b \
    trainer.n_gpus_per_node=1 \
    trainer.test_freq=100 \
    trainer.save_freq=200 \
    "$@"
