"""Ray clusters: one is started on this machine or joined, and asked whether a pool fits on it."""

import logging
import os
import signal
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.util.client import ray as client

from valor.controller.placement import ResourcePool
from valor.controller.watchdog import Watchdog
from valor.errors import Interrupted, TrainingStopped, UserError
from valor.machine import available_cores

_ANSWER_SECONDS = 5.0  # in which the head of a cluster answers


def keeps_memory(device: str) -> dict[str, str]:
    """The environment in which Ray's processes keep freed memory on CPUs: calls run in a thread, for which only the
    first of glibc's arenas keeps all of it. What the user has set stands."""
    return {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")} if device == "cpu" else {}


def start_ray(device: str, **settings: Any) -> Watchdog:
    """ray.init, whose processes end with this one, for roles on CPUs ("cpu") or GPUs. The handler of SIGTERM stays:
    Ray's would end this process at once.

    TrainingStopped when the machine is too busy for Ray to start.
    """
    watchdog, on_sigterm = Watchdog(), signal.getsignal(signal.SIGTERM)
    environment = dict(os.environ)
    os.environ |= watchdog.mark | keeps_memory(device)
    try:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
        finally:
            with suppress(ValueError):  # not in the main thread, where nobody changes it
                signal.signal(signal.SIGTERM, on_sigterm)
    except BaseException as error:
        watchdog.close()
        if isinstance(error, SystemExit):  # what Ray's handler raises
            raise Interrupted(signal.SIGTERM) from None
        if "timed out during startup" in str(error):
            raise TrainingStopped("Ray did not start in time: the machine has too much to do; run it again") from None
        raise
    finally:
        for name in watchdog.mark | keeps_memory(device):
            del os.environ[name]
            if name in environment:
                os.environ[name] = environment[name]
    return watchdog


def start_or_join(pool: ResourcePool, ray_init: dict[str, Any]) -> Watchdog:
    """Ray for `pool`: the cluster that RAY_ADDRESS or `ray_kwargs.ray_init.address` names, else one on this machine.

    `min_cpus` in `ray_init`: CPUs of all pools together, where there are several.
    """
    settings = {k: v for k, v in ray_init.items() if v is not None}
    min_cpus = settings.pop("min_cpus", pool.world_size * pool.num_threads)
    if "address" in settings or os.environ.get("RAY_ADDRESS"):
        _require_cluster(settings.get("address"))
    else:
        if pool.num_nodes > 1:
            raise UserError(
                f"{pool} needs {pool.num_nodes} nodes, and this machine alone is known: start the same command once on "
                "each node with trainer.node_rank and trainer.master_addr, or name a Ray cluster with RAY_ADDRESS or "
                "ray_kwargs.ray_init.address"
            )
        settings["address"] = "local"  # else Ray joins a cluster that already runs on this machine
        # There may be more processes than cores: the bundles have to add up.
        settings.setdefault("num_cpus", max(available_cores(), min_cpus))
        settings.setdefault("include_dashboard", False)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return start_ray(pool.device, **settings)
    except ConnectionError as error:
        raise UserError(f"Ray does not start, or join a cluster, with {settings}: {error}") from None


def _require_cluster(address: str | None) -> None:
    """UserError: nothing answers at the address of the cluster to join, which Ray would try to reach for minutes."""
    key, remedy = "ray_kwargs.ray_init.address", "leave it out"
    if address in (None, "auto") and os.environ.get("RAY_ADDRESS"):
        address, key, remedy = os.environ["RAY_ADDRESS"], "RAY_ADDRESS", "unset it"
    if address in (None, "local", "auto"):  # with auto Ray itself refuses at once
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.scheme not in ("", "ray") or not parts.hostname or not parts.port:
            raise ValueError("an address is HOST:PORT, ray://HOST:PORT or auto")
        socket.create_connection((parts.hostname, parts.port), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {key}={address} ({error}): start it there (ray start --head), correct the "
            f"address, or {remedy} to run on this machine alone"
        ) from None


def cluster_is_gone() -> bool:
    """Whether the cluster's head listens no more: Ray would wait for it for a minute, and then end this process."""
    if client.is_connected():  # its head is another machine's, and not to be reached from here
        return False
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return not answers(host.strip("[]"), int(port))


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def bundle(pool: ResourcePool) -> dict[str, float]:
    """A node's share of the pool, reserved as a whole, so that no node gets another's processes."""
    each = pool.processes_per_node
    return {"CPU": float(pool.num_threads * each), **({"GPU": float(each)} if pool.device == "cuda" else {})}


def check_nodes(pool: ResourcePool) -> None:
    """UserError: the cluster has fewer nodes of the size that the pool needs, busy or not."""
    needed, nodes = bundle(pool), [node for node in ray.nodes() if node["Alive"]]
    large = [node for node in nodes if all(node["Resources"].get(name, 0) >= needed[name] for name in needed)]
    if len(large) < pool.num_nodes:
        needs = " and ".join(f"{count:g} {name}s" for name, count in needed.items())
        has = [
            f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{node['Resources'].get('GPU', 0):g} GPUs"
            for node in nodes
        ]
        raise UserError(
            f"{pool} needs {pool.num_nodes} nodes of {needs}, and the Ray cluster has {', '.join(has)}: add "
            "nodes with `ray start --address`, or lower nnodes, n_gpus_per_node or num_threads"
        )
