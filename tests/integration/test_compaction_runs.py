"""Compaction while generation runs a step ahead: under Ray as in one process, in the loop of environments and at the
gateway, and again bit for bit after the process was killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_same_weights, read_metrics
from talking_model import make_talking_model

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

AGENT = "actor_rollout_ref.rollout.agent"
GATEWAY = ["default_agent_loop=gateway_agent"]
LOCAL = "trainer.controller=local"
WORLD = '''
import os, signal
from valor.agents import Env, Step

class World(Env):
    """Repeats the last letters, five times; kills the process when the folder in a variable is there."""

    def __init__(self):
        self.turns, self.score_ = 0, 0.0

    def reset(self, row):
        if os.path.isdir(os.environ.get("KILL_WHEN", "")):
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, text):
        self.turns += 1
        self.score_ += len(text) % 3
        return Step(f"{text[-6:]}!", 0.25 if "1" in text else 0.0, self.turns == 5)

    def score(self):
        return self.score_
'''
PROGRAM = '''
from openai import OpenAI

def play(base_url, api_key, row):
    """Four turns, a summary that the policy writes, and one turn after that."""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        def ask(messages):
            choice = client.chat.completions.create(model="policy", messages=messages, max_tokens=6).choices[0]
            return messages + [{"role": "assistant", "content": choice.message.content}]

        first = list(row["messages"])
        messages = first
        for _ in range(2):
            messages = ask(messages) + [{"role": "user", "content": "go on"}]
        summary = ask(messages)[-1]["content"]
        last = ask([*first[:-1], {"role": "user", "content": first[-1]["content"] + " Notes: " + summary}])
        return float("1" in last[-1]["content"])
'''


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> Path:
    """A policy that ends its turns."""
    return make_talking_model(tmp_path_factory.mktemp("talking") / "model")


@pytest.fixture
def command(overrides, tmp_path: Path, talking: Path):
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "program.py").write_text(PROGRAM)
    cuts = ["enable=true", "turn_length=8", "summary_length=6", "request=12+", "summary='{summary}='"]
    loops = {
        "environment": [f"{AGENT}.environment={tmp_path}/world.py:World", *(f"{AGENT}.compaction.{o}" for o in cuts)],
        "gateway": [
            f"{AGENT}.default_agent_loop=gateway_agent",
            f"{AGENT}.gateway.function={tmp_path}/program.py:play",
        ],
    }

    def make(name: str, kind: str, *more: str) -> list[str]:
        ahead = ["trainer_mode=separate_async", "sampler.max_off_policy_threshold=1", "deterministic=true"]
        return overrides(
            tmp_path / name,
            f"actor_rollout_ref.model.path={talking}",
            *loops[kind],
            f"{AGENT}.deterministic=true",
            *(f"trainer.v1.{one}" for one in ahead),
            "actor_rollout_ref.rollout.max_model_len=140",
            "data.max_response_length=64",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "data.val_files=null",
            "trainer.log_generations=16",
            "trainer.save_freq=1",
            *more,
        )

    return make


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("kind", ["environment", "gateway"])
def test_under_ray_a_step_ahead_as_in_one_process(command, tmp_path: Path, kind: str) -> None:
    assert main(command("ray", kind)) == 0
    assert main(command("local", kind, LOCAL)) == 0
    assert_same_weights(tmp_path / "ray", tmp_path / "local")
    for row, other in zip(read_metrics(tmp_path / "ray"), read_metrics(tmp_path / "local"), strict=True):
        assert row.keys() == other.keys()
        for key in row:  # a generator that has answered before may round log-probs otherwise in their last bits
            rounded = key.startswith(("rollout_corr/", "training/rollout_"))
            assert row[key] == (pytest.approx(other[key], rel=1e-3, abs=2e-6) if rounded else other[key]), key
    rows = [row for row in read_metrics(tmp_path / "ray") if row["step"] > 0]
    assert [row["off_policy/age/mean"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-5
    assert sum(row["episode/rows"] > 1 for row in rows) > 1 and all(row["episode/failed"] == 0 for row in rows)
    if kind == "environment":
        files = [*(tmp_path / "ray/samples").glob("step_*.jsonl")]
        samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert any(sample["episode"].get("compactions") for sample in samples)
        for sample in samples:  # the report has the summary, where the row was cut, and the prompt that keeps it
            cuts, prompts = sample["episode"].get("compactions", []), sample["episode"]["rows"]
            assert len(cuts) == len(prompts)
            for cut, row in zip(cuts, prompts, strict=True):
                said = zip(sample["tokens"], sample["turns"], strict=True)
                summary = "".join(token for token, turn in said if turn == cut["turn"]).removesuffix("<|end|>")
                assert summary.strip() in row["prompt"]


def test_a_run_that_is_killed_goes_on_bit_for_bit(command, tmp_path: Path) -> None:
    assert main(command("whole", "environment", LOCAL)) == 0
    kill = tmp_path / "killed" / "global_step_2"
    script = "import sys; from valor.trainer.main_ppo import main; sys.exit(main(sys.argv[1:]))"
    run = [sys.executable, "-c", script, *command("killed", "environment", LOCAL)]
    died = subprocess.run(
        run, capture_output=True, env={**os.environ, "KILL_WHEN": str(kill)}, timeout=300, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    done = {path.name for path in (tmp_path / "killed").glob("global_step_*")}
    assert "global_step_2" in done and "global_step_4" not in done
    assert main(command("killed", "environment", LOCAL, "trainer.resume_mode=auto")) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    whole, again = ({row["step"]: row for row in read_metrics(tmp_path / name)} for name in ("whole", "killed"))
    assert whole[4] == again[4]
