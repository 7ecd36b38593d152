"""Two training steps on task sets of others, and the same again from the checkpoint between them, bit for bit."""

import zlib
from pathlib import Path

import pytest
from runs import assert_same_weights, read_metrics

from valor.agents import register_format
from valor.agents.formats import Parsed, ToolCall
from valor.trainer.main_ppo import main
from valor.user_files import load_file

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples/tasksets"
AGENT = "actor_rollout_ref.rollout"
ROOM = load_file(f"{EXAMPLES}/room.py", "test")
SETS = {
    "verifiers": [
        f"data.taskset={EXAMPLES}/verifiers_tasks.py:Verifiers",
        f"data.taskset_kwargs={{name: '{EXAMPLES}/capitals.py:CapitalsTaskset'}}",
    ],
    "harbor": [
        f"data.taskset={EXAMPLES}/harbor_tasks.py:Harbor",
        f"data.taskset_kwargs={{folder: {EXAMPLES}/harbor_examples, ignore_dockerfile: true}}",
    ],
}
COMMANDS = ["echo 12 > sum.txt", "rev input.txt > output.txt", "echo 1 > sum.txt", "cat input.txt"]


@register_format("task_calls")
def task_calls(text, schemas=()):
    """Calls of the one tool in most texts, by their checksums; no call in the others."""
    name, number = schemas[0]["function"]["name"], zlib.crc32(text.encode())
    if number % 3 == 0:
        return Parsed([], text)
    arguments = {"command": COMMANDS[number % 4]} if name == "bash" else {"country": ["Ghana", "Peru"][number % 2]}
    return Parsed([ToolCall(name, arguments)], "")


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize("kind", [*SETS])
def test_two_steps_and_the_second_again(overrides, tmp_path: Path, kind: str, estimator: str) -> None:
    if kind == "verifiers":
        pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    elif ROOM.why_no_room() is not None:
        pytest.skip(f"no namespaces: {ROOM.why_no_room()}")
    more = [
        *SETS[kind],
        f"algorithm.adv_estimator={estimator}",
        f"{AGENT}.multi_turn.format=task_calls",
        f"{AGENT}.multi_turn.max_assistant_turns=3",
        f"{AGENT}.agent.deterministic=true",
        "reward.custom_reward_function.path=null",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"{AGENT}.n=4",
        "data.max_prompt_length=160",
        "data.max_response_length=200",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        *(["data.val_tasks=2", "data.val_files=null"] if kind == "verifiers" else ["data.val_files=null"]),
    ]
    assert main(overrides(tmp_path / "whole", *more)) == 0
    first = tmp_path / "whole" / "global_step_1"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}"]
    assert main(overrides(tmp_path / "resumed", *more, *resume)) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")
    whole, resumed = (read_metrics(tmp_path / name) for name in ("whole", "resumed"))
    assert [row for row in whole if row["step"] == 2] == [row for row in resumed if row["step"] == 2]
    steps = [row for row in whole if row["step"] > 0]
    for row in steps:
        assert row["episode/tool_calls"] > 0 and row["episode/failed"] == 0
        assert row["training/rollout_probs_diff_max"] < 1e-5
    assert sum(row["critic/score/max"] for row in steps) > 0
    if kind == "verifiers":
        assert any(key.startswith("val-") for row in whole for key in row)
