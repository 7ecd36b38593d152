"""Processes of a group under Ray: what a failure on one of them means for the others, and how they end."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError

from valor.controller.cluster import cluster_is_gone
from valor.controller.placement import ResourcePool
from valor.controller.ray_group import RayGroup
from valor.errors import WorkerDied
from valor.workers.dispatch import Dispatch
from valor.workers.host import RoleSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


class Pair:
    """Two ranks that work in step, by files: the first call fails on rank 1, and rank 0 waits for it meanwhile."""

    def __init__(self, context, folder: Path) -> None:
        self.rank, self.folder = context.rank, folder

    @Dispatch("all")
    def step(self, number: int) -> int:
        (self.folder / f"rank {self.rank} step {number}").touch()
        if (number, self.rank) == (1, 1):
            raise ValueError("only here")
        while number == 1 and not (self.folder / "rank 1 step 2").exists():
            time.sleep(0.01)
        return number

    def close(self) -> None:
        (self.folder / f"rank {self.rank} closed").touch()


@pytest.fixture
def group(tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    group = RayGroup(ResourcePool(1, 2, "cpu", 1), {"pair": RoleSpec(Pair, {"folder": tmp_path})}, {})
    yield group
    group.close()


def test_a_rank_that_failed_does_not_begin_what_was_sent_ahead(group, tmp_path):
    """The others would take its part in the next call for that in the one they are in."""
    first, second = (group.start("pair", "step", [((number,), {})] * 2) for number in (1, 2))
    with pytest.raises(ValueError, match="only here"):
        first()
    assert not group.settled(0.5)
    assert not (tmp_path / "rank 1 step 2").exists()
    (tmp_path / "rank 1 step 2").touch()
    assert group.settled(30)
    with pytest.raises(RuntimeError, match="the call before has failed"):
        second()
    assert group.run("pair", "step", [((3,), {})] * 2) == [3, 3]


def test_roles_are_closed_before_their_processes_end(group, tmp_path):
    group.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0 closed", "rank 1 closed"]


@pytest.mark.parametrize("error", [OutOfMemoryError("killed\nby the memory monitor"), NodeDiedError("gone")])
def test_whatever_ray_calls_a_death_is_one(error, group, monkeypatch):
    def died(*_):
        raise error

    monkeypatch.setattr(group, "_wait", died)
    with pytest.raises(WorkerDied, match=r"memory .*: start the same command again") as raised:
        group.run("pair", "step", [((2,), {})] * 2)
    assert len(str(raised.value).splitlines()) == 1
    assert ("Ray did it" in str(raised.value)) == isinstance(error, OutOfMemoryError)


def test_a_cluster_that_is_gone_is_not_waited_for(group, monkeypatch):
    """Ray would try for a minute to reach it, and then end the process before its line is said."""
    assert not cluster_is_gone()
    actors = [*group._actors]
    with monkeypatch.context() as gone:
        gone.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
        gone.setattr(ray, "kill", pytest.fail)
        assert cluster_is_gone()
        group.close()
    for actor in actors:
        ray.kill(actor)
