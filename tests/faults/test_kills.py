"""SIGKILL at random moments of every kind of run: the same numbers to the last bit, and no process left."""

import json
import random
from pathlib import Path

import pytest
import yaml
from killing import Runner, a_mark, assert_same_results, is_grader, is_ray_worker, kill_drivers, kill_helpers

from conftest import KILLS, PARITY, SEED

pytestmark = pytest.mark.slow

# Of 200 SIGKILLs; the rest go to the local run of PPO.
SHARES = {"graders": 50, "sft": 30, "rm": 20, "critic": 20, "ray driver": 4, "ray worker": 4, "sweep": 4}
SHARES["ahead"] = 20


def number(kind: str) -> int:
    """Of this run's SIGKILLs."""
    return KILLS * SHARES.get(kind, 200 - sum(SHARES.values())) // 200


@pytest.fixture
def runner(forks, tmp_path) -> Runner:
    return Runner(forks, tmp_path / "log", a_mark())


@pytest.fixture(scope="module")
def undisturbed(forks, ppo, tmp_path_factory) -> tuple[Path, float]:
    """The run of PPO that others are compared with, and its seconds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "run", Runner(forks, folder / "log", a_mark()).finish(ppo(folder / "run", PARITY))


def pairs_of(tiny, folder: Path) -> Path:
    rows = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(10, 42)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pairs.jsonl"


def rollouts_of(tiny, folder: Path) -> Path:
    draw = random.Random(0)
    rows = []
    for i in range(96):
        digit = draw.choice("0123456789")
        chat = [{"role": "user", "content": f"{10 + i % 24}+11="}]
        rows.append({"messages": chat, "response": digit * 4, "score": float(digit >= "5")})
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rollouts.jsonl"


def other_command(kind: str, tiny, folder: Path, run_dir: Path) -> list[str]:
    place = [
        *("trainer.device=cpu", "trainer.num_threads=1", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2"),
        *("trainer.total_training_steps=4", f"trainer.default_local_dir={run_dir}"),
    ]
    text = ["fsdp_config.dtype=float32", "model.enable_gradient_checkpointing=false", f"model.path={tiny['model']}"]
    if kind == "sft":
        data = [f"data.train_files={tiny['sft']}", "data.train_batch_size=8", "data.max_length=48"]
        return ["sft", *data, *text, "optim.lr=1e-3", *place]
    if kind == "rm":
        data = [f"data.train_files={pairs_of(tiny, folder)}", "data.train_batch_size=8", "data.max_length=48"]
        return ["rm", "train", *data, *text, "optim.lr=1e-3", *place]
    return [
        *("critic", "pretrain", f"pretrain.rollouts={rollouts_of(tiny, folder)}", "pretrain.holdout=0.2"),
        *(f"actor_rollout_ref.model.path={tiny['model']}", "actor_rollout_ref.rollout.n=4", "trainer.report=false"),
        *("actor_rollout_ref.actor.fsdp_config.dtype=float32", "reward.num_workers=1", "critic.optim.lr=1e-3"),
        *("data.train_batch_size=8", "critic.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("data.max_prompt_length=32", "data.max_response_length=8", *place),
    ]


def test_ppo(undisturbed, runner, ppo, tmp_path, counts):
    """Killed again and again, in runs of at most ten kills each."""
    count = max(number("ppo"), 1)
    counts("SIGKILL of PPO", count)
    draw, (reference, seconds) = random.Random(SEED), undisturbed
    for start in range(0, count, 10):
        run_dir = tmp_path / f"run_{start}"
        kill_drivers(runner, ppo(run_dir, PARITY), seconds, min(10, count - start), draw)
        assert_same_results(reference, run_dir)


def test_graders_of_ppo(undisturbed, runner, ppo, tmp_path, counts):
    """A grader that is killed grades its sample again, in a process that takes its place."""
    left = count = max(number("graders"), 1)
    counts("SIGKILL of a grader", count)
    draw, reference = random.Random(SEED + 1), undisturbed[0]
    for attempt in range(50):
        run_dir = tmp_path / f"run_{attempt}"
        left = kill_helpers(runner, ppo(run_dir, PARITY), 0.05, left, draw, is_grader)
        assert_same_results(reference, run_dir)
        if not left:
            return
    raise AssertionError(f"{left} of {count} graders were not found")


def test_episodes_of_eight_turns(runner, ppo, tmp_path, counts):
    """Waves of turns (rollout.agent.deterministic) do not depend on how long the pauses between turns are."""
    counts("SIGKILL of PPO", count := max(number("ppo") // 20, 1))
    loop = {"name": "eight", "_target_": f"{Path(__file__).with_name('eight_turns.py')}:EightTurns"}
    (tmp_path / "loops.yaml").write_text(yaml.safe_dump([loop]))
    agent = "actor_rollout_ref.rollout.agent"
    loops = [f"{agent}.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{agent}.default_agent_loop=eight"]
    settings = [PARITY, *loops, f"{agent}.deterministic=true", "data.max_response_length=40"]
    settings.append("trainer.total_training_steps=2")
    seconds = runner.finish(ppo(tmp_path / "whole", *settings))
    kill_drivers(runner, ppo(tmp_path / "cut", *settings), seconds, count, random.Random(SEED + 5))
    assert_same_results(tmp_path / "whole", tmp_path / "cut")


def test_generation_ahead(runner, ppo, tmp_path, counts):
    """Each batch by weights that are a step old: what was generated before a kill is in the checkpoint."""
    counts("SIGKILL of an asynchronous run", count := max(number("ahead"), 1))
    ahead = [PARITY, "trainer.v1.trainer_mode=separate_async", "trainer.controller=local"]
    ahead += ["trainer.v1.deterministic=true", "trainer.v1.sampler.max_off_policy_threshold=1"]
    seconds = runner.finish(ppo(tmp_path / "whole", *ahead))
    draw = random.Random(SEED + 6)
    for start in range(0, count, 10):
        run_dir = tmp_path / f"run_{start}"
        kill_drivers(runner, ppo(run_dir, *ahead), seconds, min(10, count - start), draw)
        assert_same_results(tmp_path / "whole", run_dir)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sft", "rm", "critic"])
def test_other_runs(kind, runner, tiny, tmp_path, counts):
    if not (count := number(kind)):
        pytest.skip("make test-faults")
    counts(f"SIGKILL of {kind}", count)
    seconds = runner.finish(other_command(kind, tiny, tmp_path, tmp_path / "undisturbed"))
    draw = random.Random(SEED + 2)
    for start in range(0, count, 10):
        run_dir = tmp_path / f"run_{start}"
        command = other_command(kind, tiny, tmp_path, run_dir)
        kill_drivers(runner, command, seconds, min(10, count - start), draw)
        assert_same_results(tmp_path / "undisturbed", run_dir)


@pytest.mark.faults
@pytest.mark.parametrize("who", ["driver", "worker"])
def test_ray(who, undisturbed, runner, ppo, tmp_path, counts):
    if not (count := number(f"ray {who}")):
        pytest.skip("make test-faults")
    counts(f"SIGKILL of a Ray {who}", count)
    draw, command = random.Random(SEED + 3), ppo(tmp_path / "run", PARITY, "trainer.controller=ray")
    if who == "driver":
        kill_drivers(runner, command, 25.0, count, draw)
    else:
        assert not kill_helpers(runner, command, 3.0, count, draw, is_ray_worker)
    assert_same_results(undisturbed[0], tmp_path / "run")


@pytest.mark.faults
def test_sweep(runner, ppo, tmp_path, counts):
    if not (count := number("sweep")):
        pytest.skip("make test-faults")
    counts("SIGKILL of a sweep", count)
    settings = [word for word in ppo(tmp_path, PARITY)[1:] if not word.startswith("trainer.default_local_dir")]
    arms = {"short": {"algorithm.lam": 0.9}, "long": None}
    sweep = {"base": settings, "arms": arms, "seeds": [0], "control": "long", "metric": "critic/score/mean"}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))

    def command(out: str) -> list[str]:
        return ["lab", "sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / out)]

    seconds = runner.finish(command("whole"))
    kill_drivers(runner, command("cut"), seconds, count, random.Random(SEED + 4))
    assert (tmp_path / "cut" / "table.md").read_bytes() == (tmp_path / "whole" / "table.md").read_bytes()
    for arm in ("short", "long"):
        assert_same_results(tmp_path / "whole" / arm / "seed_0", tmp_path / "cut" / arm / "seed_0")
