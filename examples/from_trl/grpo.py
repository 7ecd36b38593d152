"""GRPO with a reward of one's own, as in TRL's first example."""

import sys

import valor

MODEL, FOLDER = sys.argv[1:3] if len(sys.argv) > 2 else ("Qwen/Qwen2.5-0.5B-Instruct", "runs/from_trl_grpo")

dataset = [{"prompt": f"Write {n} different letters."} for n in range(2, 26)]


def num_unique_letters(completions, **kwargs):
    """Reward function that rewards completions with more unique letters."""
    return [float(len(set(completion))) for completion in completions]


run = valor.train(
    model=MODEL,
    reward=num_unique_letters,
    train_data=dataset,
    algorithm="grpo",
    rollout__n=8,
    train_batch_size=4,
    actor__ppo_mini_batch_size=4,
    actor__optim__lr=1e-4,
    max_prompt_length=64,
    max_response_length=16,
    total_training_steps=2,
    default_local_dir=FOLDER,
)
print([round(step["critic/score/mean"], 2) for step in run.metrics])
run.policy.save_pretrained(f"{FOLDER}/policy")
