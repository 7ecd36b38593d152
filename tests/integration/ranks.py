"""A function on every rank of a gloo group, each in a process of its own that starts in a moment."""

from __future__ import annotations

import pickle
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from forked import Forked, Forks
from valor.engines import distributed

_RANK = """
import sys, pickle
rank, file = int(sys.argv[1]), sys.argv[2]
with open(file, "rb") as stream:
    sys.path[:0] = pickle.load(stream)
    from ranks import run_rank
    run_rank(rank, *pickle.load(stream))
"""


def run_ranks(forks: Forks, folder: Path, world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(*arguments)` on each of `world` ranks; the output of one that fails is the error."""
    port = free_port()
    task = folder / f"{world}_ranks.pickle"
    task.write_bytes(pickle.dumps(sys.path) + pickle.dumps((world, port, function, arguments)))
    logs = [folder / f"rank_{rank}_of_{world}.log" for rank in range(world)]
    running = {rank: forks.start(_RANK, rank, task, log=log) for rank, log in enumerate(logs)}
    try:
        _wait(running, logs)
    finally:
        for process in running.values():  # the others would wait for the one that failed
            process.send_signal(signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Outside of the range from which the system gives ports to whoever asks for any, so that it stays free."""
    for port in random.sample(range(20_000, 26_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def run_rank(rank: int, world: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In the process of a rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("cpu", rank=rank, world_size=world, address="127.0.0.1", port=port)
    function(*arguments)
    distributed.leave_process_group()


def _wait(running: dict[int, Forked], logs: list[Path]) -> None:
    ended: set[int] = set()
    while len(ended) < len(running):
        for rank in running.keys() - ended:
            if (code := running[rank].poll()) is not None:
                assert code == 0, f"rank {rank}: exit code {code}\n{logs[rank].read_text()[-3000:]}"
                ended.add(rank)
        time.sleep(0.02)
