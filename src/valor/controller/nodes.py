"""A run that is started once per node: node 0 brings up Ray, the others lend it their devices until the run ends."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from valor.config import TrainerConfig
from valor.controller.placement import Placement, available_cores
from valor.controller.watchdog import Watchdog
from valor.errors import UserError

DEFAULT_PORT = 6379
_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_MISSED_POLLS = 3  # of node 0, after which it is gone
# Ray asks for a token that every node must have in a file; who wants that sets RAY_AUTH_MODE=token and spreads it.
_NO_TOKENS = "RAY_AUTH_MODE", "disabled"


def address_of(trainer: TrainerConfig) -> tuple[str, int]:
    """Where Ray's head listens: node 0."""
    assert trainer.master_addr is not None
    return trainer.master_addr, trainer.master_port or DEFAULT_PORT


@contextmanager
def node_zero(trainer: TrainerConfig, placement: Placement) -> Iterator[None]:
    """Ray with all `trainer.nnodes` nodes for the block. UserError when they do not come in `trainer.node_timeout`."""
    host, port = address_of(trainer)
    os.environ.setdefault(*_NO_TOKENS)
    if _reachable(host, port):
        raise UserError(f"{host}:{port} is taken, perhaps by another run: set trainer.master_port to a free port")
    dog = Watchdog()
    options = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    head = _start(options, placement, dog)
    try:
        _wait_until(
            lambda: _reachable(host, port),
            trainer.node_timeout,
            head,
            f"Ray did not start at trainer.master_addr={host}: is it an address of this machine?",
        )
        _wait_until(lambda: _connected(host, port), trainer.node_timeout, head, f"Ray does not answer at {host}:{port}")
        _wait_until(lambda: _gathered(trainer), trainer.node_timeout, head, f"not all nodes joined {host}:{port}")
        yield
    finally:
        _leave()
        _end(head)
        dog.close()


def serve(trainer: TrainerConfig, placement: Placement) -> int:
    """Any other node: join, and stay until node 0 is gone. Returns 0. UserError when node 0 cannot be reached."""
    host, port = address_of(trainer)
    _wait_until(
        lambda: _reachable(host, port),
        trainer.node_timeout,
        None,
        f"nothing answers at trainer.master_addr={host}, port {port}: start node 0, or correct the address",
    )
    os.environ.setdefault(*_NO_TOKENS)
    own = _own_address(host, port)
    dog = Watchdog()
    node = _start([f"--address={host}:{port}", f"--node-ip-address={own}"], placement, dog)
    print(f"node {trainer.node_rank}: {own} has joined {host}:{port}, and leaves when the run ends", flush=True)
    missed = 0
    try:
        while missed < _MISSED_POLLS and node.poll() is None:
            time.sleep(_POLL_SECONDS)
            missed = 0 if _reachable(host, port) else missed + 1
    finally:
        _end(node)
        dog.close()
    print(f"node {trainer.node_rank}: the run at {host} has ended", flush=True)
    return 0


def _connected(host: str, port: int) -> bool:
    """Whether the driver could join. Ray's head listens before it answers."""
    import ray

    try:
        ray.init(address=f"{host}:{port}", _node_ip_address=host, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, ValueError, RuntimeError):
        return False
    return True


def _leave() -> None:
    import ray

    with suppress(Exception):
        ray.shutdown()


def _gathered(trainer: TrainerConfig) -> bool:
    import ray

    here = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    if len(here) < trainer.nnodes:
        print(f"node 0: {len(here)} of {trainer.nnodes} nodes are here ({', '.join(here)})", flush=True)
        time.sleep(2.0)
    return len(here) >= trainer.nnodes


def _start(arguments: list[str], placement: Placement, dog: Watchdog) -> subprocess.Popen[bytes]:
    """`ray start` in the foreground of a process of ours: with it Ray's own processes of this node end, and with us."""
    needed = sum(pool.processes_per_node * pool.num_threads for pool in placement.pools.values())
    cpus = max(available_cores(), needed)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    return subprocess.Popen(
        [*command, f"--num-cpus={cpus}", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | dog.mark,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()


def _wait_until(
    done: Callable[[], bool], seconds: float, process: subprocess.Popen[bytes] | None, otherwise: str
) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise UserError(f"{otherwise} (waited trainer.node_timeout={seconds:g} s)")
        if process is not None and process.poll() is not None:
            raise UserError(f"{otherwise} (ray start ended with exit code {process.returncode})")
        time.sleep(0.2)


def _reachable(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _own_address(host: str, port: int) -> str:
    """The address by which this machine speaks to node 0."""
    with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as connection:
        return connection.getsockname()[0]
