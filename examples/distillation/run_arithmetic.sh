#!/usr/bin/env bash
# On-policy distillation on the CPU: the warm start of `make demo` learns from the policy that PPO has made of it.
set -euo pipefail

python3 -m valor.trainer.main_ppo --config-path "$(dirname "$(realpath "$0")")/../../docs/algorithms" --config-name tiny \
    distillation.enabled=true \
    distillation.teacher_models.teacher_model.model_path=runs/demo/ppo/huggingface/actor \
    distillation.distillation_loss.loss_mode=reverse_kl \
    distillation.distillation_loss.use_task_rewards=false \
    data.train_batch_size=8 \
    actor_rollout_ref.rollout.n=2 \
    trainer.test_freq=1 \
    trainer.total_training_steps=12 \
    trainer.default_local_dir=runs/distillation \
    "$@"
