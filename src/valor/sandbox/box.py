"""Runs code of others in a closed-in process, and tests for it in another: what the rest of Valor sees of it."""

from __future__ import annotations

import functools
import marshal
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from valor.sandbox import payload, walls

_HERE = str(Path(__file__).parent)
_START = f"import sys; sys.path.insert(0, {_HERE!r}); import launcher; del sys.path[0]; launcher.main()"
# The system's libraries, and where Nix keeps them; of the rest only Python itself is visible.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
_SPARE_SECONDS = 30.0  # the supervisor ends what is late; when it says nothing for so much longer, it is ill itself


class SandboxError(RuntimeError):
    """The sandbox itself failed: nothing is known about the code."""


@dataclass(frozen=True)
class Limits:
    """Of one process: CPU time of all its threads and time on the clock (s), address space, and output files (MiB)."""

    cpu_seconds: int = 2
    wall_seconds: float = 6.0
    memory_mb: int = 1024
    output_mb: int = 8


class Outcome(NamedTuple):
    """What a program printed (undecodable bytes replaced), what went wrong (None: it ended with exit status 0), and
    whether that was a lack of time."""

    stdout: str
    error: str | None
    timed_out: bool = False


class Verdict(NamedTuple):
    """How many of `total` tests passed, and what the first of the others said (None: there is none)."""

    passed: int
    total: int
    error: str | None


class Sandbox:
    """A supervisor process and the enclosed processes that it makes, one job after another; for one thread.

    Closing it ends them all, and so does the end of this process, however it comes.
    """

    def __init__(self, level: str, limits: Limits) -> None:
        self.level, self.limits = level, limits
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
        enclosure = asdict(limits) | {"level": level, "readable": _readable(), "seccomp": _seccomp(level)}
        del enclosure["wall_seconds"]
        self._send({"walls": enclosure, "packages": _packages()})

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_all(self, code: str, inputs: Iterable[str], end: float) -> Iterator[Outcome]:
        """Run a program once for each input, until `end` (as of time.monotonic).

        Raises SandboxError when it could not be run as it should.
        """
        for text in inputs:
            wall = min(self.limits.wall_seconds, end - time.monotonic())
            if wall <= 0:
                return
            stdin = text.encode("utf-8", "surrogatepass")
            self._send({"program": [code], "stdin": stdin, "wall_seconds": wall})
            report = self._report(wall)
            error = self._failure(report, wall)
            yield Outcome(report["stdout"].decode("utf-8", "replace"), error, self._timed_out(report))

    def check(
        self, codes: Sequence[str], setup: Sequence[str], tests: Sequence[str], candidates: Sequence[str]
    ) -> Verdict:
        """Run tests for the functions that the first of `codes` defines which is Python at all.

        See payload.check for the rest. Raises SandboxError when it could not be done as it should.
        """
        wall = self.limits.wall_seconds
        self._send({"functions": list(codes), "wall_seconds": wall})
        self._send((list(setup), list(tests), list(candidates)))
        report = self._report(wall)
        passed, error = 0, self._failure(report, wall)
        if error is None:
            passed, error = payload.decode(report["stdout"], lambda target: None)
            passed, error = int(passed), str(error)
        if passed < len(tests) and report["functions"]["exit"] and not report["functions"]["late"]:
            error = self._failure(report["functions"], wall) or error
        return Verdict(passed, len(tests), error or None)

    def close(self) -> None:
        """End the supervisor, and with it whatever still runs."""
        with self._process:  # the end of this closes the pipes and waits
            self._process.kill()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            payload.send(self._process.stdin.fileno(), marshal.dumps(message))
        except BrokenPipeError:
            raise self._ill() from None

    def _report(self, wall_seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        if not answers.poll(1000 * (wall_seconds + _SPARE_SECONDS)):
            raise SandboxError("the sandbox's supervisor does not answer")
        message = payload.receive(self._process.stdout.fileno())
        if not message:
            raise self._ill()
        return marshal.loads(message)

    def _ill(self) -> SandboxError:
        assert self._process.stderr is not None
        self._process.kill()
        return SandboxError(f"the sandbox's supervisor failed: {_last_line(self._process.stderr.read())}")

    def _failure(self, report: dict[str, Any], wall_seconds: float) -> str | None:
        """What ended a process before its time."""
        last, code = _last_line(report["stderr"]), report["exit"]
        if report["late"]:
            return f"no end within {wall_seconds:.3g} s"
        if not report["enclosed"]:
            raise SandboxError(f"sandbox level {self.level}: {last or f'exit status {code}'}")
        if self._timed_out(report):
            return f"more than {self.limits.cpu_seconds} s of CPU time"
        return None if code == 0 else f"killed by signal {code - 128}" if code > 128 else last or f"exit status {code}"

    def _timed_out(self, report: dict[str, Any]) -> bool:
        # The system sends SIGKILL at the limit of CPU time, and says less exactly how much was used.
        used_up = report["cpu_seconds"] > 0.8 * self.limits.cpu_seconds
        return report["late"] or (report["exit"] == 128 + signal.SIGKILL and used_up)


def _last_line(messages: bytes) -> str:
    lines = messages.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _packages() -> list[str]:
    """Where this Python has its installed packages."""
    return list(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))


def _readable() -> list[str]:
    """Files and folders that enclosed code may read: Python, its packages and the system's libraries."""
    libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    wanted = [*_SYSTEM, sys.base_prefix, sys.prefix, *libraries, *_packages()]
    spellings = (os.path.abspath, os.path.realpath)  # a link, and what it leads to
    paths = dict.fromkeys(spell(path) for path in wanted if os.path.exists(path) for spell in spellings)
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


@functools.cache
def _seccomp(level: str) -> bytes | None:
    return None if level == "rlimits" else walls.seccomp_filter()


def _environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    # Sets in the same order in every run: the same code gets the same verdict.
    return {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"} | one_thread | passed_on
