"""A critic with a prompt of its own (`critic.prompt_template`): exact, bias-free by what it may read, and resumed."""

import json
from pathlib import Path

import pytest
import torch
from runs import assert_same_run, read_metrics
from transformers import AutoModelForTokenClassification, AutoTokenizer

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

TEMPLATE = "{prompt}({ground_truth})"
TOLD = f"critic.prompt_template='{TEMPLATE}'"
ENVIRONMENT = f"actor_rollout_ref.rollout.agent.environment={Path(__file__).with_name('privileged_environment.py')}"


def samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("kept", ["true", "false"], ids=["packed", "padded"])
def test_values_are_those_of_a_separate_forward_over_the_longer_prompt(tiny, overrides, tmp_path, kept):
    """And the policy's log-probs are those of a run whose critic reads its prompts, bit for bit."""
    settings = ["trainer.log_generations=16", "trainer.total_training_steps=2", "trainer.critic_warmup=2"]
    settings += [f"critic.model.use_remove_padding={kept}", "actor_rollout_ref.rollout.n=4"]
    assert main(overrides(tmp_path / "first", *settings[:2], TOLD)) == 0
    critic = tmp_path / "first" / "huggingface" / "critic"
    assert json.loads((critic / "config.json").read_text())["value_prompt_template"] == TEMPLATE
    start = f"critic.model.path={critic}"
    more = [start, "trainer.total_training_steps=1", f"trainer.rollout_data_dir={tmp_path / 'rows'}"]
    assert main(overrides(tmp_path / "told", *settings, TOLD, *more)) == 0
    assert main(overrides(tmp_path / "plain", *settings, "trainer.total_training_steps=1")) == 0
    told, plain = samples(tmp_path / "told", 1), samples(tmp_path / "plain", 1)
    assert [row["log_probs"] for row in told] == [row["log_probs"] for row in plain]

    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    hf = AutoModelForTokenClassification.from_pretrained(critic)
    rollouts = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    assert len(told) == 16
    for row, rollout in zip(told, rollouts[:16], strict=True):
        assert tokenizer.decode(rollout["prompt_ids"]) == row["prompt"]
        question = row["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>")
        prompt = f"<|user|>{question}({row['ground_truth']})<|assistant|>"
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            outputs = hf(torch.tensor([ids + rollout["response_ids"]])).logits[0, :, 0]
        expected = outputs[len(ids) - 1 : -1]
        torch.testing.assert_close(torch.tensor(row["values"]), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("kind", ["model", "probe"])
def test_a_critic_that_is_told_what_an_environment_drew_explains_it_and_resumes(overrides, tmp_path, kind):
    def run(name, *more):
        told = [f"{ENVIRONMENT}:Drawn", "critic.prompt_template='{prompt}{drawn}'", "data.train_batch_size=40"]
        shared = [*told, f"critic.kind={kind}", "actor_rollout_ref.rollout.n=1", "trainer.save_freq=4"]
        updates = ["critic.ppo_mini_batch_size=10"] * (kind == "model")
        shared += [*updates, "actor_rollout_ref.actor.ppo_mini_batch_size=40", "actor_rollout_ref.actor.optim.lr=0"]
        shared += ["actor_rollout_ref.rollout.agent.deterministic=true", "trainer.test_freq=4"]
        assert main(overrides(tmp_path / name, *shared, "trainer.total_training_steps=8", *more)) == 0
        return read_metrics(tmp_path / name)

    steps = [row for row in run("told") if "critic/vf_explained_var" in row]
    assert steps[-1]["critic/vf_explained_var"] > 0.25
    blind = run("blind", "critic.prompt_template=null")
    assert blind[-1]["critic/vf_explained_var"] < 0.15
    run("parts", "trainer.total_training_steps=4")
    run("parts", "trainer.resume_mode=auto")
    if kind == "model":
        assert_same_run(tmp_path / "told", tmp_path / "parts")
    else:
        assert read_metrics(tmp_path / "told") == read_metrics(tmp_path / "parts")


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["critic.prompt_template=x"], "has no {prompt} in it"),
        (["critic.prompt_template='{prompt}{solution}'", "--dry-run"], "a row has no such column"),
        (
            [TOLD, "data.sampler.difficulty.enable=true", "data.sampler.difficulty.predictor=critic"],
            "critic.prompt_template others: drop one of the two",
        ),
        (["critic.prompt_template='{prompt}{solution}'"], "has {solution} in it, and a row has no such column"),
        ([f"{ENVIRONMENT}:Rewritten", "critic.prompt_template='{prompt}{drawn}'"], "an agent or data.truncation"),
        ([f"{ENVIRONMENT}:Drawn", "critic.prompt_template='{prompt}{other}'"], "has {other} in it"),
    ],
)
def test_what_cannot_be_read_is_told(overrides, tmp_path, capsys, settings, said):
    assert main(overrides(tmp_path / "run", *settings, "trainer.total_training_steps=1")) != 0
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


@pytest.mark.usefixtures("hosts")
def test_its_export_is_taken_with_its_template_alone(overrides, tmp_path, capsys):
    assert main(overrides(tmp_path / "told", TOLD, "trainer.total_training_steps=1")) == 0
    start = f"critic.model.path={tmp_path / 'told' / 'huggingface' / 'critic'}"
    assert main(overrides(tmp_path / "other", start, "trainer.total_training_steps=1")) == 2
    captured = capsys.readouterr()
    line = captured.out + captured.err
    assert "was trained with critic.prompt_template={prompt}({ground_truth}), and this command has none: take" in line
    assert line.rstrip().endswith("or set critic.prompt_template to that in valor ppo")
