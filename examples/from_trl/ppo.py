"""PPO with a critic and a learned reward model, as TRL's PPOTrainer had it."""

import sys

import valor

MODEL, REWARD_MODEL, FOLDER = (
    sys.argv[1:4] if len(sys.argv) > 3 else ("Qwen/Qwen2.5-0.5B-Instruct", "runs/reward_model", "runs/from_trl_ppo")
)

dataset = [{"prompt": f"Name a word with {n} letters."} for n in range(2, 26)]

run = valor.PPO(
    model=MODEL,
    train_data=dataset,
    reward={"reward_model": {"enable": True, "model_path": REWARD_MODEL}},
    train_batch_size=8,
    actor__ppo_mini_batch_size=8,
    actor__optim__lr=3e-6,
    actor__ppo_epochs=4,
    critic={"ppo_mini_batch_size": 8, "ppo_epochs": 4, "cliprange_value": 0.2, "optim": {"lr": 3e-6}},
    use_kl_in_reward=True,
    algorithm={"kl_ctrl": {"kl_coef": 0.05}, "gamma": 1.0, "lam": 0.95},
    max_prompt_length=64,
    max_response_length=16,
    total_training_steps=2,
    default_local_dir=FOLDER,
)
for step in run:
    print(step["training/global_step"], round(step["critic/score/mean"], 3), round(step["critic/vf_explained_var"], 3))
run.policy.save_pretrained(f"{FOLDER}/policy")
run.critic.save_pretrained(f"{FOLDER}/critic")  # AutoModelForTokenClassification: its logits are values
