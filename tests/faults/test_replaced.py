"""Processes that generate or evaluate die in the middle of a step: others take their place, and the samples and weights
are those of an undisturbed run."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest
import ray
from fault_settings import KILLS, PARITY, SEED
from killing import assert_same_results

from tiny_reward_models import make_classifier
from valor.cli import main
from valor.controller.ray_group import RayGroup

pytestmark = [pytest.mark.slow, pytest.mark.faults]

APART = "actor_rollout_ref.rollout.nnodes=1", "resource_pools={others: {roles: [ref]}}"
REFERENCE = "actor_rollout_ref.actor.use_kl_loss=true"


@pytest.fixture(scope="module")
def undisturbed(ppo, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(ppo(run_dir, PARITY, REFERENCE)) == 0
    return run_dir


def kill_at(monkeypatch: pytest.MonkeyPatch, role: str, method: str, seconds: float, call: int = 2) -> list[int]:
    """From now on the first rank is killed so many seconds after such call number `call`. Returns who was killed."""
    send, seen, killed = RayGroup._send, [], []

    def disturbed(group, name, what, *calls, **more):
        if (name, what) == (role, method):
            seen.append(1)
            if len(seen) == call:
                pid = ray.get(group._actors[0].__ray_call__.remote(lambda self: os.getpid()))
                killed.append(pid)
                if seconds:
                    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()
                else:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(0.5)
        return send(group, name, what, *calls, **more)

    monkeypatch.setattr(RayGroup, "_send", disturbed)
    return killed


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("role", "method", "seconds"),
    [
        ("rollout", "generate", 0.0),
        ("rollout", "generate", 0.05),
        ("rollout", "receive_weights", 0.0),
        ("rollout", "needs_weights", 0.0),
        ("rollout", "sleep", 0.0),
        ("ref", "compute_log_probs", 0.0),
        ("ref", "compute_log_probs", 0.02),
    ],
)
def test_the_step_goes_on(role, method, seconds, undisturbed, ppo, tmp_path, monkeypatch, counts):
    counts("SIGKILL of a role that is replaced")
    killed = kill_at(monkeypatch, role, method, seconds)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 0
    assert len(killed) == 1
    assert_same_results(undisturbed, tmp_path / "run")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_reward_model_is_replaced(seconds, ppo, tmp_path, monkeypatch, counts):
    counts("SIGKILL of a role that is replaced")
    model = make_classifier(tmp_path / "rm")
    scored = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={model}"]
    assert main(ppo(tmp_path / "undisturbed", *scored)) == 0
    killed = kill_at(monkeypatch, "reward_model", "score", seconds)
    pool = "resource_pools={others: {roles: [reward_model]}}"
    assert main(ppo(tmp_path / "run", *scored, pool)) == 0
    assert len(killed) == 1
    assert_same_results(tmp_path / "undisturbed", tmp_path / "run")


@pytest.mark.usefixtures("cluster")
def test_a_critic_that_is_judged_is_replaced(tiny, tmp_path, monkeypatch, counts):
    counts("SIGKILL of a role that is replaced")
    chat = [{"role": "user", "content": "11+22="}]
    rows = [{"messages": chat, "response": str(number), "score": number % 2} for number in range(16)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def score(out: str, *more: str) -> list[dict]:
        settings = ["data.max_prompt_length=32", "data.max_response_length=8", "trainer.device=cpu"]
        settings += [f"actor_rollout_ref.model.path={tiny['model']}", f"critic.model.path={tiny['model']}"]
        settings += [f"score.rollouts={tmp_path / 'rollouts.jsonl'}", f"score.out={tmp_path / out}"]
        assert main(["critic", "score", *settings, "trainer.num_threads=1", *more]) == 0
        return [json.loads(line) for line in (tmp_path / out / "rollouts.jsonl").read_text().splitlines()]

    expected = score("undisturbed")
    killed = kill_at(monkeypatch, "critic", "compute_values", 0.0, call=1)
    assert score("disturbed", "trainer.controller=ray") == expected
    assert len(killed) == 1


@pytest.mark.usefixtures("cluster")
def test_generators_beside_training(ppo, tmp_path, monkeypatch, counts):
    """The run goes on without being started again, and no prompt is trained on twice or left out."""
    start, alive, draw = RayGroup._start, [], random.Random(SEED + 7)
    left = count = max(KILLS // 10, 1)
    counts("SIGKILL of a generator", count)

    def remembered(group: RayGroup) -> None:
        start(group)
        if [*group.specs] == ["rollout"]:
            alive.append(ray.get(group._actors[0].__ray_call__.remote(lambda host: os.getpid())))

    monkeypatch.setattr(RayGroup, "_start", remembered)
    for attempt in range(count):
        run_dir, ended, killed, most = tmp_path / f"run_{attempt}", threading.Event(), [], min(left, 7)

        def kill(run_dir=run_dir, ended=ended, killed=killed, most=most) -> None:
            while len(killed) < most and not ended.wait(draw.uniform(0.5, 2.0)):
                if alive and (run_dir / "metrics.jsonl").exists():
                    killed.append(alive.pop())
                    os.kill(killed[-1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            steps = ["trainer.total_training_steps=30", f"trainer.rollout_data_dir={run_dir}/rollouts"]
            assert main(ppo(run_dir, PARITY, "trainer.v1.trainer_mode=separate_async", *steps)) == 0
        finally:
            ended.set()
            killer.join()
            alive.clear()
        uids: Counter[str] = Counter()
        for file in (run_dir / "rollouts").iterdir():
            with open(file, encoding="utf-8") as lines:  # an answer may hold other line breaks, for str.splitlines
                uids.update(json.loads(line)["uid"] for line in lines)
        assert set(uids.values()) == {1} and len(uids) == 30 * 8
        assert {int(uid.partition(".")[0]) for uid in uids} == set(range(1, 31))
        left -= len(killed)
        if not left:
            return
    raise AssertionError(f"{left} of {count} generators were not found")


def die_inside(monkeypatch: pytest.MonkeyPatch, role: str, method: str, at: str, number: int) -> list[float]:
    """The first rank of `role` kills itself in the first such call, when it calls WeightChannel's `at` for the
    number-th time. Returns how long each call took until its end was noticed."""
    run, seconds = RayGroup._run, []

    def arm(host) -> None:
        from valor.rollout.transfer import WeightChannel

        work, left = getattr(WeightChannel, at), [number]

        def last(*args):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*args)

        setattr(WeightChannel, at, last)

    def disturbed(group, name, what, calls, sink, feed):
        mine = (name, what) == (role, method)
        if mine and not seconds:
            ray.get(group._actors[0].__ray_call__.remote(arm))
        began = time.monotonic()
        try:
            return run(group, name, what, calls, sink, feed)
        finally:
            if what in ("send_weights", "receive_weights"):
                seconds.append(time.monotonic() - began)

    monkeypatch.setattr(RayGroup, "_run", disturbed)
    return seconds


NOTICED = 60.0  # seconds: 20 in which both sides meet, then the end of those who wait for one that is gone
INSIDE = [("__init__", 1), ("_broadcast", 1), ("_broadcast", 2), ("_broadcast", 3), ("_broadcast", 5)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("at", "number"), INSIDE)
def test_a_rollout_that_dies_inside_a_transfer_is_noticed(at, number, undisturbed, ppo, tmp_path, monkeypatch, counts):
    """The actor would wait for it for half an hour."""
    counts("SIGKILL inside a transfer of weights")
    seconds = die_inside(monkeypatch, "rollout", "receive_weights", at, number)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 0
    assert max(seconds) < NOTICED
    assert_same_results(undisturbed, tmp_path / "run")


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(150)
def test_no_rank_of_the_actor_is_left_behind_when_a_rollout_dies_inside_a_transfer(ppo, tmp_path, monkeypatch, counts):
    """All ranks gather each tensor; the first one alone sends them, in many buckets, and hears that nobody listens."""
    counts("SIGKILL inside a transfer of weights")
    start = RayGroup._start

    def in_small_buckets(host) -> None:
        from valor.rollout import transfer

        buckets = transfer.buckets
        transfer.buckets = lambda weights, dtype, device, limit: buckets(weights, dtype, device, 4096)

    def started(group: RayGroup) -> None:
        start(group)
        ray.get([actor.__ray_call__.remote(in_small_buckets) for actor in group._actors])

    monkeypatch.setattr(RayGroup, "_start", started)
    seconds = die_inside(monkeypatch, "rollout", "receive_weights", "_broadcast", 9)
    ranks = "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=1"
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART, *ranks)) == 0
    assert max(seconds) < NOTICED


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("at", "number"), [("__init__", 1), ("_broadcast", 2)])
def test_an_actor_that_dies_inside_a_transfer_is_noticed(at, number, ppo, tmp_path, monkeypatch, capsys, counts):
    counts("SIGKILL inside a transfer of weights")
    seconds = die_inside(monkeypatch, "actor", "send_weights", at, number)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 1
    assert max(seconds) < NOTICED
    assert "same command again" in capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
def test_an_actor_is_not_replaced(ppo, tmp_path, monkeypatch, capsys, counts):
    counts("SIGKILL of a role that is not replaced")
    kill_at(monkeypatch, "actor", "update", 0.0)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 1
    error = capsys.readouterr().err.strip()
    assert "died" in error and "same command again" in error and len(error.splitlines()) == 1
