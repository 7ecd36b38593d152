"""A run that is started once per node: node 0 is Ray's head, the others join it until the run ends."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from tempfile import TemporaryFile

from valor.config import TrainerConfig
from valor.controller.placement import MAIN, Placement
from valor.controller.watchdog import Watchdog
from valor.errors import UserError

_DEFAULT_PORT = 6379
# Otherwise every node needs Ray's token in a file; with RAY_AUTH_MODE=token the user provides it.
_NO_TOKENS = "RAY_AUTH_MODE", "disabled"
_LEAVES_AFTER = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # without node 0


@contextmanager
def node_zero(trainer: TrainerConfig, placement: Placement) -> Iterator[None]:
    """Ray with all `trainer.nnodes` nodes for the block. UserError when they do not come in `trainer.node_timeout`."""
    import ray

    from valor.controller.cluster import start_ray

    host, port = _address(trainer)
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UserError(
            f"Ray cannot listen at {host}:{port} ({error.strerror}): set trainer.master_addr to an address of this "
            "machine, and trainer.master_port to a free port"
        ) from None
    os.environ.setdefault(*_NO_TOKENS)
    os.environ["RAY_GCS_SERVER_PORT"] = str(port)
    settings = {"_node_ip_address": host, "num_cpus": placement.cpus_per_node, "include_dashboard": False}
    with closing(start_ray(placement.pools[MAIN].device, address="local", **settings)):
        try:
            deadline, joined = time.monotonic() + trainer.node_timeout, list[str]()
            while len(joined) < trainer.nnodes:
                joined = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{len(joined)} of {trainer.nnodes} nodes ({', '.join(joined)}) have joined {host}:{port} in "
                        f"trainer.node_timeout={trainer.node_timeout:g} s: start the same command on the others"
                    )
                time.sleep(0.2)
            yield
        finally:
            ray.shutdown()


def serve(trainer: TrainerConfig, placement: Placement) -> int:
    """Any other node: `ray start` until node 0 is gone. Returns 0. UserError when it cannot be joined."""
    from valor.controller.cluster import answers, keeps_memory

    host, port = _address(trainer)
    deadline = time.monotonic() + trainer.node_timeout
    while not answers(host, port):
        if time.monotonic() > deadline:
            raise UserError(
                f"nothing answers at trainer.master_addr={host}, port {port}: start node 0, or correct the address "
                f"(waited trainer.node_timeout={trainer.node_timeout:g} s)"
            )
        time.sleep(0.2)
    os.environ.setdefault(*_NO_TOKENS)
    print(f"node {trainer.node_rank}: joins {host}:{port}, and leaves when the run ends", flush=True)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={host}:{port}", "--block"]
    with closing(Watchdog()) as dog, TemporaryFile() as output:
        subprocess.run(
            [*command, f"--num-cpus={placement.cpus_per_node}", "--disable-usage-stats"],
            stdout=output,
            stderr=output,
            env=os.environ | dog.mark | _LEAVES_AFTER | keeps_memory(placement.pools[MAIN].device),
        )
        output.seek(0)
        ray_output = " ".join(output.read().decode(errors="replace").split())
    if "Ray runtime started" not in ray_output:
        raise UserError(
            f"node {trainer.node_rank} could not join Ray at {host}:{port}: start it with node 0's versions of Ray and "
            f"Python, and nothing else at that port; Ray says: {ray_output[-400:]}"
        )
    print(f"node {trainer.node_rank}: the run at {host} has ended", flush=True)
    return 0


def _address(trainer: TrainerConfig) -> tuple[str, int]:
    """Where Ray's head listens: node 0."""
    assert trainer.master_addr is not None
    return trainer.master_addr, trainer.master_port or _DEFAULT_PORT
