"""How many processes, on what device, with how many CPU threads, and whether roles fit on them: decided once, before
anything is started."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from valor.config import PPOConfig, TrainerConfig
from valor.controller.threads import threads_for
from valor.errors import UserError, did_you_mean
from valor.machine import available_cores
from valor.rollout.registry import GENERATION_ENGINES
from valor.workers.roles import ROLES

MAIN = "main"


@dataclass(frozen=True)
class ResourcePool:
    """Processes that host roles: `processes_per_node` on each of `num_nodes` nodes, one GPU each when on `cuda`."""

    num_nodes: int
    processes_per_node: int
    device: str  # "cpu" or "cuda"
    num_threads: int  # CPU threads of each process
    deterministic: bool = False  # only algorithms that give the same bits every time, where torch has them
    threads_note: str = ""  # why there are fewer threads than cores, for the user

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node

    def __str__(self) -> str:
        what = "GPU" if self.device == "cuda" else f"CPU process, {self.num_threads} threads each"
        return f"{self.world_size} x {what} on {self.num_nodes} node(s)"


@dataclass(frozen=True)
class Placement:
    """Where a run's roles live: `pools` by name, `home` of the roles that are not in the pool MAIN."""

    controller: str  # "local" or "ray"
    pools: dict[str, ResourcePool]
    home: dict[str, str]

    @property
    def world_size(self) -> int:
        """Processes of all pools."""
        return sum(pool.world_size for pool in self.pools.values())

    @property
    def cpus_per_node(self) -> int:
        """What a node announces to Ray. It may run more processes than it has cores: their shares have to add up."""
        return max(available_cores(), sum(pool.processes_per_node * pool.num_threads for pool in self.pools.values()))

    def pool_of(self, role: str) -> str:
        return self.home.get(role, MAIN)

    def table(self, roles: Iterable[str]) -> str:
        """The roles of each pool, a line a pool."""
        roles = list(roles)
        width = max(map(len, self.pools))
        return "\n".join(
            f"{name:<{width}}  {pool}: {', '.join(role for role in roles if self.pool_of(role) == name)}"
            for name, pool in self.pools.items()
        )


def startable(placement: Placement) -> Placement:
    """The same. UserError: Ray would start it, which is not installed."""
    if placement.controller == "ray" and find_spec("ray") is None:
        raise UserError(
            f"{placement.world_size} processes under trainer.controller=ray need Ray, which is not installed: pip "
            "install ray, or run one process (trainer.controller=local trainer.n_gpus_per_node=1)"
        )
    return placement


def resolve_pool(trainer: TrainerConfig, ray_address: str | None = None, *, beside: int = 0) -> Placement:
    """All roles in one pool, the one that `trainer.*` asks for on this machine.

    `ray_address` is that of `ray_kwargs.ray_init`; `beside`: processes of other pools on a node. UserError when there
    are fewer GPUs than asked for, when controller=local would be several processes, and when a machine without GPUs
    would decide for those of a cluster.
    """
    gpus, number = torch.cuda.device_count(), trainer.n_gpus_per_node
    device = trainer.device if trainer.device != "auto" else ("cuda" if gpus else "cpu")
    cluster = ray_address or os.environ.get("RAY_ADDRESS")
    if cluster and trainer.device == "auto" and device == "cpu" and trainer.controller != "local":
        raise UserError(
            f"this machine has no GPU, and the run joins the Ray cluster at {cluster}: set trainer.device=cuda and "
            "trainer.n_gpus_per_node to use the cluster's GPUs, or trainer.device=cpu"
        )
    remote = trainer.nnodes > 1 or trainer.controller == "ray"
    if device == "cuda" and not remote and gpus < (number or 1):
        raise UserError(
            f"trainer.n_gpus_per_node={number or 1} asked, {gpus} GPUs found: set trainer.n_gpus_per_node to what is "
            "there, or trainer.device=cpu"
        )
    if device == "cpu" and trainer.device == "auto" and (number or 1) > 1:
        raise UserError(
            f"trainer.n_gpus_per_node={number} asked, and this machine has no GPU: set trainer.n_gpus_per_node=1 to "
            "run on the CPU, or trainer.device=cpu to run that many CPU processes"
        )
    processes = number or (gpus if device == "cuda" else 1)
    here = device == "cpu" and trainer.nnodes == 1 and cluster is None and not trainer.full_determinism
    threads, why = threads_for(trainer, max(1, available_cores() // (processes + beside)), measure=here)
    pool = ResourcePool(trainer.nnodes, processes, device, threads, trainer.full_determinism, why)
    controller = trainer.controller
    if controller == "auto":
        alone = pool.world_size == 1 and getattr(trainer, "node_rank", None) is None
        controller = "local" if alone else "ray"
    if controller == "local" and pool.world_size > 1:
        raise UserError(
            f"trainer.controller=local runs one process, {pool.world_size} asked: use trainer.controller=ray"
        )
    return Placement(controller, {MAIN: pool}, {})


def resolve_placement(config: PPOConfig) -> Placement:
    """The run's pools: that of `trainer.*`, and those of `resource_pools` on the same device, or on the CPU if they
    only send requests to servers.

    Pools may come to lie on one node, so its cores are shared out over the processes of all of them.
    """
    remote_engine = GENERATION_ENGINES[config.actor_rollout_ref.rollout.name].elsewhere
    beside = sum(pool.n_gpus_per_node for pool in config.pools.values())
    alone = resolve_pool(config.trainer, config.ray_kwargs.ray_init.get("address"), beside=beside)
    main = alone.pools[MAIN]
    pools, home = {MAIN: main}, {}
    for name, pool in config.pools.items():
        pools[name] = replace(
            main,
            num_nodes=pool.nnodes,
            processes_per_node=pool.n_gpus_per_node,
            device="cpu" if remote_engine and pool.roles == ["rollout"] else main.device,
            num_threads=pool.num_threads or main.num_threads,
        )
        for role in pool.roles:
            home |= dict.fromkeys(ROLES[role].names(config, role), name)
    apart = bool(config.pools) or config.trainer.node_rank is not None
    return Placement("ray" if apart and not _in_threads(config) else alone.controller, pools, home)


def _in_threads(config: PPOConfig) -> bool:
    """Whether a generator beside the trainer is a thread of its process: for a debugger, and where Ray is not."""
    asynchronous = config.trainer.v1.trainer_mode == "separate_async" and config.trainer.controller == "local"
    pools = list(config.pools.values())
    return asynchronous and [pool.roles for pool in pools] == [["rollout"]] and pools[0].n_gpus_per_node == 1


def check_placement(config: PPOConfig) -> Iterator[str]:
    """Contradictions in where roles run and how processes share rows and layers out, a line each."""
    yield from _check_pools(config)
    policy = config.actor_rollout_ref
    for key, role, model in (
        ("actor_rollout_ref", policy.actor, policy.model),
        ("critic", config.critic, config.critic.model),
    ):
        if role.ulysses_sequence_parallel_size > 1 and not model.use_remove_padding:
            yield f"sequence parallelism shares packed rows out: set {key}.model.use_remove_padding=true"


def _check_pools(config: PPOConfig) -> Iterator[str]:
    homes: dict[str, str] = {}
    movable = [role for role, row in ROLES.items() if row.movable]
    v1 = config.trainer.v1
    for name in config.resource_pools.keys() & config.asked_pools.keys():
        yield f"resource_pools.{name}: that is the name of the pool that {name}'s own keys ask for: take another"
    for name, pool in config.pools.items():
        key = f"resource_pools.{name}"
        for role in pool.roles:
            if role in homes:
                yield f"resource_pools: {role} is in {homes[role]} and in {name}: leave it in one of them"
            if role not in movable:
                yield f"{key}.roles: '{role}' is none of {', '.join(movable)}{did_you_mean(role, movable)}"
            elif not ROLES[role].wanted(config):
                yield f"{key}.roles names {role}, which this run does not have: remove it"
            if role == "ref" and "full" in config.kl_kinds:
                yield (
                    "the exact KL (kl_loss_type, kl_penalty=full) is computed beside the actor: take ref out of "
                    f"{key}.roles, or take an estimator such as k3"
                )
            homes[role] = name
        others = " and ".join(role for role in pool.roles if role != "rollout")
        if "rollout" in pool.roles and others and v1.trainer_mode == "separate_async" and not v1.by_batches:
            yield (
                f"{key}: the generators of separate_async stop for nobody, and {others} would wait for ever: leave "
                "rollout alone in its pool"
            )
    if config.pools and config.trainer.controller == "local" and not _in_threads(config):
        yield (
            f"{', '.join(config.pools)}: a pool has processes of its own and trainer.controller=local is one process: "
            "use ray"
        )
