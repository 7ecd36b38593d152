"""Calls through a group reach the ranks as their markers say and come back in the given order."""

import threading

import pytest
import torch

from valor.controller.group import Pools, WorkerGroup, split_rows
from valor.controller.placement import MAIN, Placement, ResourcePool, resolve_pool
from valor.data.batch import Batch
from valor.errors import UserError
from valor.workers.dispatch import Dispatch
from valor.workers.host import RoleSpec


class Doubler:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @Dispatch("dp")
    def double(self, batch: Batch, plus: float = 0.0) -> Batch:
        return Batch({"y": batch["x"] * 2 + plus})

    @Dispatch("dp", keep_together="uid")
    def who(self, batch: Batch) -> Batch:
        return Batch({"rank": torch.full((len(batch),), self.rank)})

    @Dispatch("dp")
    def report(self, batch: Batch, *, sink) -> Batch:
        for value in batch["x"].tolist():
            sink(value)
        return batch

    @Dispatch("all")
    def name(self) -> str:
        return f"rank {self.rank}"

    def private(self) -> None: ...


class Threads(WorkerGroup):
    """A group whose ranks are plain objects; `model_parallel` neighbours work on one share."""

    def __init__(self, world_size: int, model_parallel: int = 1) -> None:
        super().__init__(ResourcePool(1, world_size, "cpu", 1), {"doubler": RoleSpec(Doubler, {})})
        self.ranks = [Doubler(r) for r in range(world_size)]
        self.model_parallel = model_parallel

    def run(self, role, method, calls, sink=None, feed=None):
        if method == "layout":
            return [{"doubler": rank // self.model_parallel} for rank in range(len(self.ranks))]
        given = {} if sink is None else {"sink": sink}
        self.given = [args[0] for args, _ in calls if args]
        return [
            getattr(w, method)(*args, **kwargs, **given) for w, (args, kwargs) in zip(self.ranks, calls, strict=True)
        ]

    def close(self) -> None: ...


def batch_of(lengths: list[int]) -> Batch:
    prompts = torch.arange(len(lengths) * max(lengths)).view(len(lengths), -1)
    return Batch(
        {"x": torch.arange(len(lengths)).float(), "prompts": prompts, "prompt_lengths": torch.tensor(lengths)},
        {"uid": [f"u{i // 2}" for i in range(len(lengths))]},
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_come_back_in_order_whatever_the_world_size(world_size, rows):
    batch = batch_of([3 * i + 1 for i in range(rows)])
    out = Threads(world_size)["doubler"].double(batch, plus=1.0)
    assert out["y"].tolist() == [2.0 * i + 1.0 for i in range(rows)]


@pytest.mark.parametrize(("world_size", "model_parallel"), [(2, 2), (4, 2), (6, 3)])
def test_processes_of_one_data_parallel_rank_get_the_same_rows(world_size, model_parallel):
    batch = batch_of([3 * i + 1 for i in range(7)])
    group = Threads(world_size, model_parallel)
    assert group["doubler"].double(batch)["y"].tolist() == [2.0 * i for i in range(7)]
    rows = [given["x"].tolist() for given in group.given]
    shares = [rows[start : start + model_parallel] for start in range(0, world_size, model_parallel)]
    assert all(one == share[0] for share in shares for one in share)
    assert sorted(x for share in shares for x in share[0]) == batch["x"].tolist()
    assert group["doubler"].who(batch)["rank"].unique().tolist() == list(range(0, world_size, model_parallel))


def test_samples_of_a_prompt_stay_on_one_rank():
    ranks = Threads(3)["doubler"].who(batch_of([5, 1, 4, 4, 9, 2, 3, 3]))["rank"].tolist()
    assert all(ranks[i] == ranks[i + 1] for i in range(0, 8, 2))
    assert len(set(ranks)) > 1


def test_split_is_balanced_by_tokens():
    parts = split_rows(batch_of([10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]), 2, None)
    work = [sum([10, *[1] * 10][i] for i in part) for part in parts]
    assert work == [10, 10]


def grouped_batch(groups: int, size: int, prompt: int, response: int) -> Batch:
    prompts = torch.arange(groups * prompt).view(groups, prompt).repeat(size, 1)  # rows of a group far apart
    lengths = {"prompt_lengths": prompt, "response_lengths": response}
    return Batch({"prompts": prompts, **{name: torch.full((len(prompts),), n) for name, n in lengths.items()}})


def test_answers_to_a_prompt_stay_on_one_rank_as_long_as_that_balances():
    for groups, ranks in ((8, 2), (6, 3), (2, 2)):
        parts = split_rows(grouped_batch(groups, 4, 100, 50), ranks, None)
        assert sorted(row % groups for part in parts for row in set(part)) == sorted([*range(groups)] * 4)
        assert all(len({row % groups for row in part}) == groups // ranks for part in parts)
        assert all(len(part) == 4 * groups // ranks for part in parts)


def test_a_group_is_cut_where_ranks_would_be_idle():
    assert sorted(map(len, split_rows(grouped_batch(1, 8, 10, 50), 4, None))) == [2, 2, 2, 2]
    assert sorted(map(len, split_rows(grouped_batch(3, 4, 10, 50), 2, None))) == [6, 6]
    # 300 + 10 tokens to compute twice is more than ten times 20 at once
    assert sorted(map(len, split_rows(grouped_batch(1, 10, 300, 20), 2, None))) == [5, 5]
    assert sorted(map(len, split_rows(grouped_batch(1, 2, 300, 0), 2, None))) == [0, 2]


def test_rows_of_an_episode_go_with_its_prompt():
    batch = grouped_batch(2, 2, 10, 5)
    later = Batch({**batch.tensors, "prompts": batch["prompts"] + 1000})  # what its second turn was asked
    both = Batch.concat([batch, later]).take([0, 4, 1, 5, 2, 6, 3, 7])
    both["episode"] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert sorted(split_rows(both, 2, None)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_all_answers_with_the_first_rank_and_unmarked_methods_are_private():
    handle = Threads(2)["doubler"]
    assert handle.name() == "rank 0"
    with pytest.raises(AttributeError, match="no dispatch marker"):
        handle.private()


class FakeTrainer:
    nnodes, controller, device, n_gpus_per_node, num_threads = 1, "auto", "cpu", None, 3
    full_determinism = False


def test_a_cpu_machine_runs_one_local_process_by_default():
    placement = resolve_pool(FakeTrainer())
    pool = placement.pools[MAIN]
    assert (pool.world_size, pool.device, pool.num_threads, placement.controller) == (1, "cpu", 3, "local")


def test_several_cpu_processes_run_under_ray_and_not_locally():
    trainer = FakeTrainer()
    trainer.n_gpus_per_node = 2
    assert resolve_pool(trainer).controller == "ray"
    trainer.controller = "local"
    with pytest.raises(UserError, match=r"trainer\.controller=ray"):
        resolve_pool(trainer)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_sink_gets_what_every_rank_reports(world_size):
    heard = []
    Threads(world_size)["doubler"].report(batch_of([1, 2, 3, 4]), sink=heard.append)
    assert sorted(heard) == [0.0, 1.0, 2.0, 3.0]


def two_pools() -> Pools:
    pools = {"main": ResourcePool(1, 1, "cpu", 1), "other": ResourcePool(1, 1, "cpu", 1)}
    placement = Placement("ray", pools, {"critic": "other"})
    return Pools(placement, {name: Threads(1) for name in pools})


def test_roles_of_two_pools_work_at_the_same_time_and_those_of_one_in_order():
    pools, meet, done = two_pools(), threading.Barrier(2, timeout=10), []

    def phase(name: str, waits: bool = False) -> str:
        if waits:
            meet.wait()
        done.append(name)
        return name

    critic = pools.submit("critic", phase, "critic", waits=True)
    actor = pools.submit("actor", phase, "actor", waits=True)  # would wait for ever behind the critic
    ref = pools.submit("ref", phase, "ref")
    assert [f.result(10) for f in (critic, actor, ref)] == ["critic", "actor", "ref"]
    assert done.index("actor") < done.index("ref")
    pools.close()


def test_an_error_of_a_pool_comes_with_its_result():
    pools = two_pools()

    def fails() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        pools.submit("critic", fails).result(10)
    pools.close()


def test_with_one_pool_a_phase_has_run_when_it_is_submitted():
    placement = Placement("local", {"main": ResourcePool(1, 1, "cpu", 1)}, {})
    done: list[str] = []
    assert Pools(placement, {"main": Threads(1)}).submit("critic", done.append, "ran").result(0) is None
    assert done == ["ran"]
