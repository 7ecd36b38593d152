"""Where processes go on machines that are pretended: cores of several pools, a driver without a GPU, device numbers."""

import os
import sys
import threading
from dataclasses import replace

import pytest
import ray
import torch

from valor.config import load
from valor.controller import placement, ray_group
from valor.controller.placement import MAIN, Placement, ResourcePool, resolve_placement, resolve_pool
from valor.controller.ray_group import own_gpu
from valor.engines.base import deterministic_backward
from valor.errors import UserError
from valor.workers.dispatch import Dispatch
from valor.workers.host import WorkerHost

TWO_POOLS = [
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=4",
]


def config(*overrides: str):
    return load(["data.train_files=x", "actor_rollout_ref.model.path=x", *overrides]).config


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(placement, "available_cores", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name in ("RAY_ADDRESS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_pools_share_the_cores_of_a_node():
    found = resolve_placement(config(*TWO_POOLS))
    assert [pool.num_threads for pool in found.pools.values()] == [8, 8]
    assert resolve_placement(config("trainer.n_gpus_per_node=4")).pools["main"].num_threads == 16
    more = Placement("ray", {name: replace(pool, num_threads=16) for name, pool in found.pools.items()}, found.home)
    assert (found.cpus_per_node, more.cpus_per_node) == (64, 128)  # 4 x 16 and 4 x 16: the second pool is placed too


@pytest.mark.parametrize("where", ["key", "variable"])
def test_a_machine_without_gpus_does_not_decide_for_a_cluster(monkeypatch, where):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    trainer = config().trainer
    assert resolve_pool(trainer).pools[MAIN].device == "cpu"
    address = "10.0.0.1:6379" if where == "key" else None
    if where == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UserError, match=r"10\.0\.0\.1:6379: set trainer\.device=cuda and trainer\.n_gpus_per_node"):
        resolve_pool(trainer, address)
    assert resolve_pool(trainer.model_copy(update={"device": "cpu"}), address).pools[MAIN].device == "cpu"
    gpus = trainer.model_copy(update={"device": "cuda", "n_gpus_per_node": 8, "controller": "ray"})
    assert resolve_pool(gpus, address).pools[MAIN].processes_per_node == 8


def test_each_thread_that_runs_a_call_uses_the_devices_of_its_rank(monkeypatch):
    set_in: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: set_in.append((threading.current_thread().name, device))
    )
    worker = WorkerHost(0, 1, "cpu", torch.get_num_threads())
    worker.connect()
    worker.context.device = torch.device("cuda", 3)

    class Role:
        @Dispatch("all", light=True)
        def work(self) -> None: ...

    worker.context.roles["role"] = Role()
    thread = threading.Thread(target=worker.call, args=("role", "work"), name="another")
    thread.start()
    thread.join()
    worker.close()
    assert set_in == [("another", torch.device("cuda", 3))]


def test_full_determinism_reaches_every_process_and_the_backward_pass(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    asked = config("trainer.full_determinism=true", *TWO_POOLS)
    assert all(pool.deterministic for pool in resolve_placement(asked).pools.values())
    assert config("actor_rollout_ref.actor.fsdp_config.full_determinism=true").trainer.full_determinism
    seen = []
    try:
        WorkerHost(0, 1, "cpu", torch.get_num_threads(), deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        x = torch.ones(1, requires_grad=True)
        y = x * 1.0
        y.register_hook(lambda grad: seen.append(torch.is_deterministic_algorithms_warn_only_enabled()))
        with deterministic_backward():
            y.sum().backward()
        assert seen == [False] and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


class Pretended:
    """A rank that has no GPU and says which one it would use."""

    def __init__(self, rank: int, pool: ResourcePool) -> None:
        self.rank = rank

    def address(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), 0

    def connect(self, address: str, port: int) -> None: ...

    def build(self, specs: dict) -> None: ...

    def close(self) -> None: ...

    def call(self, role: str, method: str, args: tuple, kwargs: dict, *_):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible, own_gpu(), ray.get_gpu_ids(), ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="poll")
    def poll(self, number: int | None, last: bool = False, brought: tuple = ()):
        return None, []


@pytest.mark.slow
@pytest.mark.alone
def test_eight_ranks_in_two_pools_on_two_nodes_have_a_device_each(monkeypatch):
    """Whether Ray hides the other devices from a process, or not."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    variable = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(ray_group, "_RayHost", Pretended)
    for module in (sys.modules[__name__], ray_group, placement):  # so that no process has to import torch
        ray.cloudpickle.register_pickle_by_value(module)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 4})
    try:
        cluster.add_node(num_cpus=8, num_gpus=4)
        with pytest.raises(UserError, match="needs 3 nodes of 4 CPUs and 2 GPUs, and the Ray cluster has"):
            ray_group.RayGroup(ResourcePool(3, 2, "cuda", 2), {}, {"address": cluster.address})
        for noset in (False, True):
            environment = {"env_vars": {variable: "1"}} if noset else {}
            ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
            check_devices(noset)
            ray.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def check_devices(noset: bool) -> None:
    groups = []
    try:
        for _ in range(2):
            groups.append(ray_group.RayGroup(ResourcePool(2, 2, "cuda", 2), {}, {}))
        found = [group.run("role", "where", [((), {})] * 4) for group in groups]
        places = [(node, given[0]) for ranks in found for _, _, given, node in ranks]
        assert len(set(places)) == 8 and len({node for node, _ in places}) == 2
        for visible, number, given, _ in (rank for ranks in found for rank in ranks):
            assert number == (int(given[0]) if noset else 0)
            assert noset or visible == str(given[0])
    finally:
        for group in reversed(groups):
            group.close()
