"""SIGKILL at random moments of every kind of run: the same numbers to the last bit, and no process left."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import yaml
from fault_settings import KILLS, PARITY, SEED
from killing import (
    Runner,
    a_mark,
    assert_same_results,
    is_grader,
    is_ray_worker,
    kill_drivers,
    kill_helpers,
    kill_often,
)

pytestmark = pytest.mark.slow

# Of 200 SIGKILLs; the rest go to the local run of PPO. Of 20 or more every kind gets one.
SHARES = {"graders": 50, "sft": 30, "rm": 20, "critic": 20, "ray driver": 4, "ray worker": 4, "sweep": 4}
SHARES["ahead"] = 20


def number(kind: str) -> int:
    """Of this run's SIGKILLs."""
    return max(KILLS * SHARES.get(kind, 200 - sum(SHARES.values())) // 200, int(KILLS >= 20))


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
    counts("SIGKILL of PPO", count := max(number("ppo"), 1))
    reference, seconds = undisturbed
    kill = partial(kill_drivers, runner, seconds, random.Random(SEED))
    same = partial(assert_same_results, reference)
    kill_often(kill, lambda run_dir: ppo(run_dir, PARITY), tmp_path, count, same)


def test_graders_of_ppo(undisturbed, runner, ppo, tmp_path, counts):
    """A grader that is killed grades its sample again, in a process that takes its place."""
    counts("SIGKILL of a grader", count := max(number("graders"), 1))
    kill = partial(kill_helpers, runner, 0.05, random.Random(SEED + 1), is_grader)
    same = partial(assert_same_results, undisturbed[0])
    kill_often(kill, lambda run_dir: ppo(run_dir, PARITY), tmp_path, count, same)


def test_episodes_of_eight_turns(runner, ppo, tmp_path, counts):
    """Waves of turns (rollout.agent.deterministic) do not depend on how long the pauses between turns are."""
    counts("SIGKILL of PPO", count := max(number("ppo") // 20, 1))
    loop = {"name": "eight", "_target_": f"{Path(__file__).with_name('eight_turns.py')}:EightTurns"}
    (tmp_path / "loops.yaml").write_text(yaml.safe_dump([loop]))
    agent = "actor_rollout_ref.rollout.agent"
    loops = [f"{agent}.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{agent}.default_agent_loop=eight"]
    settings = [PARITY, *loops, f"{agent}.deterministic=true", "data.max_response_length=40"]
    settings.append("trainer.total_training_steps=2")
    kill = partial(kill_drivers, runner, runner.finish(ppo(tmp_path / "whole", *settings)), random.Random(SEED + 5))
    same = partial(assert_same_results, tmp_path / "whole")
    kill_often(kill, lambda run_dir: ppo(run_dir, *settings), tmp_path, count, same)


def test_generation_ahead(runner, ppo, tmp_path, counts):
    """Each batch by weights that are a step old: what was generated before a kill is in the checkpoint."""
    counts("SIGKILL of an asynchronous run", count := max(number("ahead"), 1))
    ahead = [PARITY, "trainer.v1.trainer_mode=separate_async", "trainer.controller=local"]
    ahead += ["trainer.v1.deterministic=true", "trainer.v1.sampler.max_off_policy_threshold=1"]
    kill = partial(kill_drivers, runner, runner.finish(ppo(tmp_path / "whole", *ahead)), random.Random(SEED + 6))
    same = partial(assert_same_results, tmp_path / "whole")
    kill_often(kill, lambda run_dir: ppo(run_dir, *ahead), tmp_path, count, same)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sft", "rm", "critic"])
def test_other_runs(kind, runner, tiny, tmp_path, counts):
    if not (count := number(kind)):
        pytest.skip("make test-faults")
    counts(f"SIGKILL of {kind}", count)
    command = partial(other_command, kind, tiny, tmp_path)
    kill = partial(kill_drivers, runner, runner.finish(command(tmp_path / "whole")), random.Random(SEED + 2))
    kill_often(kill, command, tmp_path, count, partial(assert_same_results, tmp_path / "whole"))


@pytest.mark.faults
@pytest.mark.parametrize("who", ["driver", "worker"])
def test_ray(who, undisturbed, runner, ppo, tmp_path, counts):
    if not (count := number(f"ray {who}")):
        pytest.skip("make test-faults")
    counts(f"SIGKILL of a Ray {who}", count)
    draw = random.Random(SEED + 3)

    def command(run_dir):
        return ppo(run_dir, PARITY, "trainer.controller=ray")

    seconds = runner.finish(command(tmp_path / "whole"))
    drivers = partial(kill_drivers, runner, seconds, draw)
    workers = partial(kill_helpers, runner, seconds / 4, draw, is_ray_worker)
    kill = drivers if who == "driver" else workers
    kill_often(kill, command, tmp_path, count, partial(assert_same_results, undisturbed[0]))


@pytest.mark.faults
def test_sweep(runner, ppo, tmp_path, counts):
    if not (count := number("sweep")):
        pytest.skip("make test-faults")
    counts("SIGKILL of a sweep", count)
    settings = [word for word in ppo(tmp_path, PARITY)[1:] if not word.startswith("trainer.default_local_dir")]
    arms = {"short": {"algorithm.lam": 0.9}, "long": None}
    sweep = {"base": settings, "arms": arms, "seeds": [0], "control": "long", "metric": "critic/score/mean"}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))

    def command(out: Path) -> list[str]:
        return ["lab", "sweep", str(tmp_path / "sweep.yaml"), "--out", str(out)]

    def same(out: Path) -> None:
        assert (out / "table.md").read_bytes() == (whole / "table.md").read_bytes()
        for arm in arms:
            assert_same_results(whole / arm / "seed_0", out / arm / "seed_0")

    whole = tmp_path / "whole"
    kill = partial(kill_drivers, runner, runner.finish(command(whole)), random.Random(SEED + 4))
    kill_often(kill, command, tmp_path, count, same)
