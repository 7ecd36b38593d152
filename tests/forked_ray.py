"""Ray's workers, forked from a process that has imported what they need: seven seconds of imports less for each.

Run as a script it stands in for Ray's `setup_worker.py`: a worker is forked for it, and it lasts as long as that one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forked import Forks

_VARIABLE = "VALOR_TESTS_RAY_WORKERS"  # the abstract socket at which workers are to be had
_MESSAGE_BYTES = 2**20
_SERVE = "import sys\nsys.path.insert(0, sys.argv.pop(1))\nimport forked_ray\nforked_ray.serve(*sys.argv[1:])"


@contextmanager
def forked_workers(forks: Forks) -> Iterator[None]:
    """A Ray cluster that is started inside has workers that are forked; they can be started as long as this lasts."""
    from ray._private.parameter import RayParams

    name, init = f"valor-tests-{os.getpid()}", RayParams.__init__
    server = forks.start(_SERVE, os.path.dirname(__file__), name)
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            if probe.connect_ex(f"\0{name}") == 0:
                break
        assert server.poll() is None
        time.sleep(0.02)
    os.environ[_VARIABLE] = name
    RayParams.__init__ = lambda self, *args, **more: init(self, *args, **more, setup_worker_path=__file__)
    try:
        yield
    finally:
        RayParams.__init__ = init
        del os.environ[_VARIABLE]
        server.send_signal(signal.SIGKILL)
        server.wait()


def serve(name: str) -> None:
    """In the process that they are forked from: one for each connection. It ends with the one that has started it."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        while True:
            connection, _ = listener.accept()
            message, streams, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
            if message and os.fork() == 0:
                listener.close()
                _become(streams, **json.loads(message))
            connection.close()
            for stream in streams:
                os.close(stream)


def _become(streams: list[int], arguments: list[str], environment: dict[str, str], cwd: str, niceness: int) -> None:
    """In the child, which keeps the connection open: the worker that setup_worker.py would have started."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ |= environment
    os.chdir(cwd)
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    from ray._private.workers.setup_worker import parser  # only now: as it is imported Ray reads the environment

    _, sys.argv = parser.parse_known_args(arguments)
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def _ask() -> None:
    """In Ray's child: have the worker forked, with what was given to this process, and wait for its end."""
    given = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect("\0" + os.environ[_VARIABLE])
        socket.send_fds(connection, [json.dumps(given).encode()], [0, 1, 2])
        connection.recv(1)


if __name__ == "__main__":
    _ask()
