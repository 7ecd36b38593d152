"""Processes that generate or evaluate die in the middle of a step: others take their place, and the samples and weights
are those of an undisturbed run."""

import os
import signal
import threading
import time

import pytest
import ray
from killing import assert_same_results

from conftest import PARITY
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


def kill_at(monkeypatch: pytest.MonkeyPatch, role: str, method: str, seconds: float) -> list[int]:
    """From now on the first rank is killed so many seconds after the second such call. Returns who was killed."""
    run, seen, killed = RayGroup._run, [], []

    def disturbed(group, name, what, calls, sink):
        if (name, what) == (role, method):
            seen.append(1)
            if len(seen) == 2:
                pid = ray.get(group._actors[0].__ray_call__.remote(lambda self: os.getpid()))
                killed.append(pid)
                if seconds:
                    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()
                else:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(0.5)
        return run(group, name, what, calls, sink)

    monkeypatch.setattr(RayGroup, "_run", disturbed)
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

    def disturbed(group, name, what, calls, sink):
        mine = (name, what) == (role, method)
        if mine and not seconds:
            ray.get(group._actors[0].__ray_call__.remote(arm))
        began = time.monotonic()
        try:
            return run(group, name, what, calls, sink)
        finally:
            if what in ("send_weights", "receive_weights"):
                seconds.append(time.monotonic() - began)

    monkeypatch.setattr(RayGroup, "_run", disturbed)
    return seconds


INSIDE = [("__init__", 1), ("_broadcast", 1), ("_broadcast", 2), ("_broadcast", 3), ("_broadcast", 5)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("at", "number"), INSIDE)
def test_a_rollout_that_dies_inside_a_transfer_is_noticed(at, number, undisturbed, ppo, tmp_path, monkeypatch, counts):
    """The actor would wait for it for half an hour."""
    counts("SIGKILL inside a transfer of weights")
    seconds = die_inside(monkeypatch, "rollout", "receive_weights", at, number)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 0
    assert max(seconds) < 30.0
    assert_same_results(undisturbed, tmp_path / "run")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("at", "number"), [("__init__", 1), ("_broadcast", 2)])
def test_an_actor_that_dies_inside_a_transfer_is_noticed(at, number, ppo, tmp_path, monkeypatch, capsys, counts):
    counts("SIGKILL inside a transfer of weights")
    seconds = die_inside(monkeypatch, "actor", "send_weights", at, number)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 1
    assert max(seconds) < 30.0
    assert "same command again" in capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
def test_an_actor_is_not_replaced(ppo, tmp_path, monkeypatch, capsys, counts):
    counts("SIGKILL of a role that is not replaced")
    kill_at(monkeypatch, "actor", "update", 0.0)
    assert main(ppo(tmp_path / "run", PARITY, REFERENCE, *APART)) == 1
    error = capsys.readouterr().err.strip()
    assert "died" in error and "same command again" in error and len(error.splitlines()) == 1
