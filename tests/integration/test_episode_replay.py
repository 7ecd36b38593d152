"""Runs whose policy calls tools: repeatable whatever the tools' speed, and replayed to the bit without the tools."""

import json
import shutil
from pathlib import Path

import pytest
from runs import assert_same_run, assert_same_weights

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

TOOLS = '''
import asyncio
import random

from valor.agents import function_tool, register_format
from valor.agents.formats import Parsed, ToolCall


@function_tool
async def ask(length: int) -> str:
    """Ask for something.

    Args:
        length: Of the question.
    """
    await asyncio.sleep(random.SystemRandom().random() / 30)
    if length == 2:
        raise ValueError("two is too short")
    return f"{length} {ANSWER}"


@register_format("anything")
def anything(text, schemas):
    return Parsed([ToolCall("ask", {"length": len(text)})] if text else [], text)
'''


@pytest.fixture(scope="session")
def talker(tiny, tmp_path_factory) -> Path:
    """The tiny model with many end tokens, so that it soon ends a turn; most of them are not the template's own."""
    model = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(tiny["model"], model)
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1, *range(150, 200)]}))
    return model


@pytest.fixture
def play(overrides, talker, tmp_path):
    """Runs two steps with a tool, whose answer is an expression, into a folder of that name; what main returns."""

    def run(name: str, *more: str, answer: str = "'yes'") -> int:
        tools = tmp_path / f"{name}_tools.py"
        tools.write_text(TOOLS.replace("{ANSWER}", "{" + answer + "}"))
        return main(command(name, tools, *more))

    def command(name: str, tools: Path, *more: str) -> list[str]:
        return overrides(
            tmp_path / name,
            f"actor_rollout_ref.model.path={talker}",
            f"critic.model.path={talker}",
            "data.train_batch_size=4",
            "data.val_max_samples=4",
            "data.max_response_length=64",
            "trainer.total_training_steps=2",
            "trainer.test_freq=1",
            "actor_rollout_ref.rollout.multi_turn.enable=true",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
            "actor_rollout_ref.rollout.multi_turn.format=anything",
            f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tools}",
            "actor_rollout_ref.rollout.agent.deterministic=true",
            *more,
        )

    run.command = command
    return run


def test_a_run_is_replayed_without_its_tools(play, tmp_path, capsys):
    random_answer = "random.SystemRandom().randrange(10**6)"
    keep = [f"trainer.episode_data_dir={tmp_path / 'kept'}", "trainer.log_val_generations=4"]
    assert play("first", *keep, answer=random_answer) == 0
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(
        ["1.jsonl", "2.jsonl", "tools.json", "val_0.jsonl", "val_1.jsonl", "val_2.jsonl"]
    )
    records = [json.loads(line) for line in (tmp_path / "kept" / "1.jsonl").read_text().splitlines()]
    assert [record["key"][1:] for record in records] == [[1, i] for i in range(8)]
    assert any(turn["prompt_ids"] for record in records for turn in record["turns"])  # rows of their own
    calls = [call for record in records for call in record["info"]["calls"]]
    assert {call["error"] for call in calls} >= {None} and calls[0].keys() >= {"turn", "name", "arguments", "text"}

    check_samples(tmp_path / "first" / "samples" / "step_1.jsonl", records[:4], measured=True)
    validated = [json.loads(line) for line in (tmp_path / "kept" / "val_1.jsonl").read_text().splitlines()]
    check_samples(tmp_path / "first" / "samples" / "val_step_1.jsonl", validated, measured=False)

    (tmp_path / "first_tools.py").unlink()
    again = [f"actor_rollout_ref.rollout.agent.replay_dir={tmp_path / 'kept'}"]
    assert main(play.command("second", tmp_path / "gone.py", *again)) == 0
    assert_same_run(tmp_path / "first", tmp_path / "second")
    first, second = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("first", "second"))
    for recorded, replayed in zip(map(json.loads, first[1:]), map(json.loads, second[1:]), strict=True):
        assert replayed["episode/tool_calls"] > 0 and replayed["episode/tool_errors/exception"] > 0
        assert replayed["episode/tool_seconds"] == recorded["episode/tool_seconds"] > 0

    # Other settings learn from the same episodes; one that there is not ends the run in a line.
    assert main(play.command("third", tmp_path / "gone.py", *again, "critic.optim.lr=0.5")) == 0
    assert main(play.command("fourth", tmp_path / "gone.py", *again, "trainer.seed=9")) == 2
    assert "has no episode 0 of step -1 with trainer.seed=9" in capsys.readouterr().err


def check_samples(file: Path, records: list[dict], *, measured: bool) -> None:
    """The samples are these episodes, with the rows of each put together."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(records) == 4
    for sample, record in zip(samples, records, strict=True):
        said = list(zip(sample["tokens"], sample["turns"], strict=True))
        for number, turn in enumerate(record["turns"], 1):
            assert "".join(token for token, of_turn in said if of_turn == number) == turn["text"]
        told = "".join(turn["observation"] for turn in record["turns"])
        assert "".join(token for token, of_turn in said if of_turn == 0) == told
        assert sample["mask"] == [int(turn > 0) for turn in sample["turns"]]
        if measured:
            assert [value is not None for value in sample["values"]] == [turn > 0 for turn in sample["turns"]]
        rows = [turn["prompt_ids"] for turn in record["turns"] if turn["prompt_ids"]]
        assert len(sample["episode"]["rows"]) == len(rows)
        assert sample["episode"]["calls"] == record["info"]["calls"]


def test_the_speed_of_tools_changes_nothing(play, tmp_path):
    assert play("one") == 0
    assert play("two") == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_cut_rows_are_trained_replayed_and_resumed(play, tmp_path):
    """Compaction in the loop of tools: exact log-probs, and the same bits from records and from a checkpoint."""
    agent = "actor_rollout_ref.rollout.agent"
    options = ["enable=true", "turn_length=8", "summary_length=6", "request=12+", "summary='{summary}='"]
    cuts = [f"{agent}.compaction.{option}" for option in options]
    cuts += ["actor_rollout_ref.rollout.max_model_len=60", "trainer.test_freq=-1", "data.max_response_length=28"]
    cuts += ["actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6"]
    keep = [f"trainer.episode_data_dir={tmp_path / 'kept'}", "trainer.save_freq=1", "trainer.log_generations=8"]
    assert play("first", *cuts, *keep) == 0
    metrics = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()][-2:]
    for row in metrics:
        assert row["episode/compactions"] > 0 and row["episode/compacted_tokens"] > 0
        assert row["training/rollout_log_probs_diff_max"] < 1e-5 and row["episode/failed"] == 0
    records = [json.loads(line) for line in (tmp_path / "kept" / "1.jsonl").read_text().splitlines()]
    cut = [(record, cut["turn"]) for record in records for cut in record["info"]["compactions"]]
    assert cut and all(record["turns"][turn]["prompt_ids"] for record, turn in cut)
    samples = [json.loads(line) for line in (tmp_path / "first" / "samples" / "step_1.jsonl").read_text().splitlines()]
    shown = [sample["episode"].get("compactions", []) for sample in samples]
    assert shown == [record["info"]["compactions"] for record in records]

    again = [f"{agent}.replay_dir={tmp_path / 'kept'}"]
    assert main(play.command("second", tmp_path / "gone.py", *cuts, *again)) == 0
    checkpoint = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'first' / 'global_step_1'}"]
    assert play("third", *cuts, *checkpoint) == 0
    for name in ("second", "third"):
        assert_same_weights(tmp_path / "first", tmp_path / name)
