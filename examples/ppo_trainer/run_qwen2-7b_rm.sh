#!/usr/bin/env bash
# PPO with a critic and a learned reward model on helpfulness/harmlessness prompts, Qwen2.5-7B-Instruct, 8 GPUs.
# Prompts: python examples/data_preprocess/full_hh_rlhf.py --split rl
set -euo pipefail

python3 -m valor.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/full_hh_rlhf/rl/train.parquet" \
    data.val_files="$HOME/data/full_hh_rlhf/rl/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    critic.model.path=Qwen/Qwen2.5-7B-Instruct \
    critic.optim.lr=1e-5 \
    reward_model.enable=True \
    reward_model.path=OpenAssistant/reward-model-deberta-v3-large \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.01 \
    trainer.project_name=valor_ppo_hh \
    trainer.experiment_name=qwen2_5_7b_rm \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=5 \
    "$@"
