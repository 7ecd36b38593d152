"""Ends what a process has started when that process is gone, however it went: a killed driver cannot do it itself.

Run as a script it is the watching process, which needs the standard library alone.
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

_NAME = "VALOR_STARTED_BY"
_SECONDS, _PAUSE = 10.0, 0.1


class Watchdog:
    """What has `mark` in its environment, and all that it starts, is killed at `close`, or when this process ends.

    Works on Linux; elsewhere nothing is watched.
    """

    def __init__(self) -> None:
        self.mark = {_NAME: f"{os.environ.get(_NAME, '')}/{secrets.token_hex(8)}"}  # the outer one's reaches in too
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux":
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, self.mark[_NAME]],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        """Kill what is left, and watch no longer."""
        if self._process is not None:
            self._process.communicate()


def keeps_memory(device: str) -> dict[str, str]:
    """The environment in which Ray's processes keep freed memory on CPUs: calls run in a thread, for which only the
    first of glibc's arenas keeps all of it. What the user has set stands."""
    return {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")} if device == "cpu" else {}


def start_ray(device: str, **settings: Any) -> Watchdog:
    """ray.init, whose processes end with this one, for roles on CPUs ("cpu") or GPUs. SIGTERM stays whose it was: Ray
    would end this process at once.

    TrainingStopped when the machine has so much to do that Ray does not get up.
    """
    import ray

    from valor.errors import TrainingStopped

    watchdog, on_sigterm = Watchdog(), signal.getsignal(signal.SIGTERM)
    inner = watchdog.mark | keeps_memory(device)
    outer = {name: os.environ[name] for name in inner if name in os.environ}
    os.environ |= inner
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
    except BaseException as error:
        watchdog.close()
        if "timed out during startup" in str(error):
            raise TrainingStopped("Ray did not start in time: the machine has too much to do; run it again") from None
        raise
    finally:
        for name in inner:
            del os.environ[name]
        os.environ |= outer
        with suppress(ValueError):  # not in the main thread, where nobody changes it
            signal.signal(signal.SIGTERM, on_sigterm)
    return watchdog


def _watch(mark: str) -> None:
    """Wait until nobody holds the other end of stdin, then kill until nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    end = time.monotonic() + _SECONDS
    while _kill(f"{_NAME}={mark}".encode()) and time.monotonic() < end:
        time.sleep(_PAUSE)


def _kill(variable: bytes) -> bool:
    """Whether there was anything to kill."""
    found = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = any(one.startswith(variable) for one in file.read().split(b"\0"))
            if marked and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
                found = True
    return found


if __name__ == "__main__":
    _watch(sys.argv[1])
