"""Ends what a process has started when that process is gone, however it went: a killed driver cannot do it itself.

Run as a script it is the watching process, which needs the standard library alone.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress

_NAME = "VALOR_STARTED_BY"
_SECONDS, _PAUSE = 10.0, 0.1


class Watchdog:
    """Processes with `mark` in their environment, and all that these start, are killed at `close`, or when this process
    ends.

    Works on Linux; elsewhere nothing is watched.
    """

    def __init__(self) -> None:
        self.mark = {_NAME: f"{os.environ.get(_NAME, '')}/{secrets.token_hex(8)}"}  # an outer run's first
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


def _watch(mark: str) -> None:
    """Wait until the other end of stdin is closed, then kill until nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    end = time.monotonic() + _SECONDS
    while _kill(f"{_NAME}={mark}".encode()) and time.monotonic() < end:
        time.sleep(_PAUSE)


def _kill(variable: bytes) -> bool:
    """Whether there was anything to kill."""
    killed = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = any(line.startswith(variable) for line in file.read().split(b"\0"))
            if marked and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
                killed = True
    return killed


if __name__ == "__main__":
    _watch(sys.argv[1])
