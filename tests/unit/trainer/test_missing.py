"""What a run would miss is told before torch is imported, all of it at once."""

import subprocess
import sys

import pytest

from valor import hub
from valor.config import SFTConfig, load
from valor.trainer import missing as looked_for
from valor.trainer.missing import missing

R = "actor_rollout_ref.rollout"


@pytest.fixture
def unreachable(monkeypatch):
    asked = []
    monkeypatch.setattr(looked_for, "hub_answers", lambda: bool(asked.append(1)))
    return asked


def test_every_wrong_path_at_once(tmp_path, unreachable):
    tools = f"{R}.multi_turn.function_tool_path=no_tools.py"
    settings = [
        "data.train_files=[no.jsonl,other.jsonl]",
        "data.val_files=val.jsonl",
        "actor_rollout_ref.model.path=./no_model",
        "critic.model.path=org/no_critic",
        "reward.custom_reward_function.path=no_reward.py",
        f"{R}.multi_turn.enable=true",
        tools,
    ]
    lines = missing(load(settings).config)
    for name in ("no.jsonl", "other.jsonl", "val.jsonl", "no_model", "org/no_critic", "no_reward.py", "no_tools.py"):
        assert sum(name in line for line in lines) == 1, name
    assert len(lines) == 7
    unread = ["algorithm.adv_estimator=grpo", f"{R}.n=2", f"{R}.multi_turn.enable=false"]
    lines = missing(load([*settings[:-2], tools, *unread]).config)
    assert not any("no_critic" in line or "no_tools" in line for line in lines)  # which that run does not read


def test_a_name_of_the_hub_is_asked_for_only_where_the_hub_is_out_of_reach(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    config = load([f"data.train_files={tmp_path}/rows.jsonl", "model.path=org/name"], SFTConfig).config
    monkeypatch.setattr(looked_for, "hub_answers", lambda: True)
    assert missing(config) == []
    monkeypatch.setattr(looked_for, "hub_answers", lambda: False)
    assert missing(config) == [hub.out_of_reach("org/name")]


def test_torch_is_not_imported_to_say_so():
    code = (
        "import sys; from valor.trainer.main_ppo import main; code = main(['data.train_files=no.jsonl', "
        "'actor_rollout_ref.model.path=./no']); assert code == 2 and 'torch' not in sys.modules, sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no.jsonl: no such file") == 1 and "there is no model directory './no'" in done.stderr
