"""Two steps with sub-agents: exact log-probs, the second step again from a checkpoint, and a replay of the records."""

import zlib
from pathlib import Path

import pytest
from runs import assert_same_weights, read_metrics

from valor.agents import register_format
from valor.agents.formats import Parsed, ToolCall
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
JUDGE = "def judge(task, answer):\n    return len(answer) % 2 / 4\n"


@register_format("delegating")
def delegating(text, schemas=()):
    """Most texts of the main agent are a task for a sub-agent, which has no tools and so only answers."""
    if not schemas or zlib.crc32(text.encode()) % 4 == 0:
        return Parsed([], text)
    return Parsed([ToolCall("delegate", {"task": text[-3:] or "x"})], "")


def test_rows_of_sub_agents_are_exact_and_repeat(overrides, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    entry = f"class_name: sub_agent\n    config: {{max_turns: 2, reward: {tmp_path}/judge.py:judge}}"
    (tmp_path / "tools.yaml").write_text(f"tools:\n  - {entry}\n")
    more = [
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        f"{ROLLOUT}.multi_turn.format=delegating",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        f"{ROLLOUT}.agent.deterministic=true",
        "data.max_response_length=120",
        "data.train_batch_size=4",
        "data.val_files=null",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        f"trainer.episode_data_dir={tmp_path}/episodes",
    ]
    assert main(overrides(tmp_path / "whole", *more)) == 0
    first = tmp_path / "whole" / "global_step_1"
    again = {
        "resumed": [
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={first}",
            f"trainer.episode_data_dir={tmp_path}/others",
        ],
        "replayed": [f"{ROLLOUT}.agent.replay_dir={tmp_path}/episodes", "trainer.episode_data_dir=null"],
    }
    for name, settings in again.items():
        assert main(overrides(tmp_path / name, *more, *settings)) == 0
        assert_same_weights(tmp_path / "whole", tmp_path / name)
    whole, resumed = (read_metrics(tmp_path / name) for name in ("whole", "resumed"))
    assert [row for row in whole if row["step"] == 2] == [row for row in resumed if row["step"] == 2]
    for row in whole:
        if row["step"] > 0:
            assert row["episode/rows"] > 1 and row["episode/failed"] == 0 and row["episode/sub_agents"] > 0
            assert row["training/rollout_probs_diff_max"] < 1e-5
