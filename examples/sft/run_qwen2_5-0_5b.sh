#!/usr/bin/env bash
# Supervised fine-tuning on helpful and harmless conversations, Qwen2.5-0.5B-Instruct, one GPU.
# Data: python examples/data_preprocess/full_hh_rlhf.py --split sft
set -euo pipefail

python3 -m valor sft \
    model.path=Qwen/Qwen2.5-0.5B-Instruct \
    data.train_files="$HOME/data/full_hh_rlhf/sft/train.parquet" \
    data.val_files="$HOME/data/full_hh_rlhf/sft/test.parquet" \
    data.max_length=2048 \
    data.truncation=right \
    data.train_batch_size=64 \
    optim.lr=1e-5 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.03 \
    trainer.project_name=valor_sft \
    trainer.experiment_name=qwen2_5_0_5b \
    trainer.n_gpus_per_node=1 \
    trainer.test_freq=200 \
    trainer.total_epochs=1 \
    "$@"
