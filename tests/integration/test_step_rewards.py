"""Whole runs with rewards by step: of a grader, of a process reward model, and progress under another critic."""

import json
from pathlib import Path

import pytest
import torch
from runs import assert_same_run, read_metrics
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tiny_reward_models import TEMPLATE, character_tokenizer, save
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow
SOURCE = "valor/arithmetic"
SHORT = ("data.val_files=null", "trainer.total_training_steps=2", "trainer.log_generations=16")


def samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def with_model(path: Path, gives: str, *more: str) -> list[str]:
    model = "reward.reward_model"
    return [
        *SHORT,
        f"{model}.enable=true",
        f"{model}.model_path={path}",
        f"{model}.gives={gives}",
        f"{model}.fsdp_config.dtype=float32",
        *more,
    ]


@pytest.fixture(scope="module")
def prm(tiny, tmp_path_factory) -> Path:
    """A process reward model of two labels with the policy's tokenizer."""
    model = AutoModelForTokenClassification.from_pretrained(tiny["model"], num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    return save(model, tokenizer, tmp_path_factory.mktemp("prm") / "prm", seed=3)


def test_a_graders_steps_reach_the_tokens_and_the_advantages(overrides, tmp_path):
    grader = f"reward.custom_reward_function.path={Path(__file__).with_name('step_reward.py')}"
    plain = ("algorithm.adv_whitening=none", "algorithm.lam=1")
    assert main(overrides(tmp_path / "run", *SHORT, grader, *plain)) == 0
    row = read_metrics(tmp_path / "run")[0]
    assert f"reward/{SOURCE}/step_reward" in row
    seen = 0
    for sample in samples(tmp_path / "run", 1):
        step = sample["reward_info"].get("step_reward", 0.0)
        outcome = sample["reward"] - step
        assert outcome in (0.0, 1.0) and float(sample["reward_info"].get("acc", outcome)) == outcome
        # a fresh head gives 0 everywhere, so the advantages are the rewards to come
        expected = [sample["reward"], *[outcome] * (len(sample["advantages"]) - 1)]
        if step and len(expected) > 1:
            assert sample["advantages"] == pytest.approx(expected, abs=1e-6)
            seen += 1
    assert seen


def test_branches_are_not_worth_what_steps_before_them_have_earned(overrides, tmp_path):
    """All there is to earn is behind the first token: every value is known, so no advantage is left."""
    (tmp_path / "first.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.0, 'step_rewards': [(0, 10.0)]}\n"
    )
    more = [f"reward.custom_reward_function.path={tmp_path}/first.py", "algorithm.adv_whitening=none"]
    more += ["algorithm.branch_values.share=1", "algorithm.branch_values.branches=1"]
    assert main(overrides(tmp_path / "run", *SHORT, *more)) == 0
    row = read_metrics(tmp_path / "run")[0]
    assert row["critic/rewards/mean"] == 10 and row["response_length/max"] > 1
    assert row["critic/advantages/max"] == row["critic/advantages/min"] == 0


def test_a_process_reward_model_scores_each_token_and_joins_the_rule(overrides, tiny, prm, tmp_path):
    weights = ("reward.reward_model.weight=0.5", "reward.reward_model.rule_weight=2")
    more = ("reward.reward_model.label=1", *weights, f"trainer.rollout_data_dir={tmp_path / 'rollouts'}")
    assert main(overrides(tmp_path / "run", *with_model(prm, "steps", *more))) == 0
    model = AutoModelForTokenClassification.from_pretrained(prm, dtype=torch.float32)
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    for record in records:
        prompt, response, info = record["prompt_ids"], record["response_ids"], record["reward_info"]
        with torch.no_grad():
            right = model(input_ids=torch.tensor([prompt + response])).logits[0].softmax(-1)[len(prompt) :, 1]
        assert info["rm_score"] == pytest.approx(float(right.mean()), abs=1e-4)
        assert info["step_reward"] == pytest.approx(0.5 * float(right.sum()), abs=1e-3)
        assert record["score"] == pytest.approx(0.5 * float(right.sum()) + 2 * info["rule_score"], abs=1e-3)
    assert len({round(record["score"], 4) for record in records}) > 4


def test_a_process_reward_model_of_another_tokenizer_reads_steps_of_text(overrides, tmp_path):
    from transformers import LlamaConfig, LlamaForTokenClassification

    tokenizer = character_tokenizer(template=TEMPLATE)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=2, num_key_value_heads=1, pad_token_id=0, **size)
    path = save(LlamaForTokenClassification(config), tokenizer, tmp_path / "prm", seed=1)
    more = ("reward.reward_model.label=0",)
    assert main(overrides(tmp_path / "none", *with_model(path, "steps", *more))) == 2
    separated = (*more, "reward.reward_model.step_separator=1")
    assert main(overrides(tmp_path / "run", *with_model(path, "steps", *separated))) == 0
    for sample in samples(tmp_path / "run", 1):
        assert 0 <= sample["reward"] <= 8


def test_progress_moves_advantages_not_scores_and_resumes_bitwise(overrides, tmp_path):
    first = tmp_path / "first"
    assert main(overrides(first, *SHORT)) == 0
    prover = with_model(first / "huggingface" / "critic", "progress", "reward.reward_model.weight=2")
    off = ("algorithm.adv_whitening=none", "trainer.save_freq=1")
    assert main(overrides(tmp_path / "plain", *SHORT, *off)) == 0
    assert main(overrides(tmp_path / "run", *prover, *off)) == 0
    for plain, sample in zip(samples(tmp_path / "plain", 1), samples(tmp_path / "run", 1), strict=True):
        assert plain["reward"] == sample["reward"]
        gained = [b - a for a, b in zip(plain["advantages"], sample["advantages"], strict=True)]
        assert gained[-1] == pytest.approx(0.0, abs=1e-6)
    assert any(
        a["advantages"] != b["advantages"]
        for a, b in zip(samples(tmp_path / "plain", 1), samples(tmp_path / "run", 1), strict=True)
    )
    again = ("trainer.total_training_steps=1",)
    assert main(overrides(tmp_path / "resumed", *prover, *off, *again)) == 0
    assert main(overrides(tmp_path / "resumed", *prover, *off, "trainer.resume_changed=allow")) == 0
    assert_same_run(tmp_path / "run", tmp_path / "resumed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.reward_mask_ratio=0.5"], "reward_mask_ratio takes away"),
        (["reward.reward_model.rule_weight=1"], "no effect"),
        (["reward.reward_model.gives=steps", "reward.reward_model.label=5"], "has 2 labels"),
        (["reward.reward_model.gives=steps"], "classifies into 2 labels"),
        (["reward.reward_model.gives=steps", "algorithm.reward_binarize=true"], "drop one of them"),
    ],
)
def test_what_does_not_go_together_is_one_line(overrides, prm, tmp_path, capsys, settings, message):
    code = main(overrides(tmp_path / "run", *with_model(prm, "progress", *settings)))
    err = capsys.readouterr()
    assert message in err.err + err.out
    assert code == 2 or message == "no effect"
