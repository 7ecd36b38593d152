"""Servers of `served_model`, each in a process of its own that starts in a moment."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from ranks import free_port

from forked import Forked, Forks

CODE = "import sys\nsys.path[:0] = sys.argv[1].split(':')\nfrom served_model import main\nmain(*sys.argv[2:])"


@dataclass
class Served:
    """A server at `url`, and its process."""

    url: str
    process: Forked

    def set(self, **faults: Any) -> list[str]:
        """From now on it has these faults alone; the paths that it was asked for so far."""
        return httpx2.post(f"{self.url}/faults", json=faults, timeout=30).json()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Starter:
    """Starts servers with the model of a folder."""

    def __init__(self, forks: Forks, folder: Path, logs: Path) -> None:
        self._forks, self._folder, self._logs = forks, folder, logs
        self._started: list[Served] = []

    def start(self, kind: str, port: int | None = None, faults: dict[str, Any] | None = None) -> Served:
        port = port or free_port()
        paths = ":".join(one for one in sys.path if one)
        log = self._logs / f"{port}.log"
        process = self._forks.start(CODE, paths, self._folder, kind, port, log=log)
        served = Served(f"http://127.0.0.1:{port}", process)
        self._started.append(served)
        end = time.monotonic() + 60
        while True:
            with suppress(httpx2.HTTPError):
                served.set(**(faults or {}))
                return served
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.02)

    def close(self) -> None:
        for one in self._started:
            with suppress(ProcessLookupError):
                one.kill()


@contextmanager
def starter(folder: Path, logs: Path) -> Iterator[Starter]:
    modules = ["valor.models.load", "valor.rollout.native.engine", "transformers.models.qwen2.modeling_qwen2"]
    with closing(Forks(*modules, OMP_NUM_THREADS="1")) as forks, closing(Starter(forks, folder, logs)) as servers:
        yield servers
