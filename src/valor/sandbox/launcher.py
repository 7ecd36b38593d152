"""The supervisor of a sandbox: makes one enclosed process for every job, waits for it, ends it, and reports.

It reads jobs on stdin and answers on stdout, and never runs code of others itself. When the process that started it
dies, it ends everything. Tests are read only after the process of the code under test has been made, so that no copy
of them is in that one's memory. Standard library only.
"""

from __future__ import annotations

import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from valor.sandbox import payload, walls
else:  # as files beside this one: importing valor would take longer than the whole run
    import payload
    import walls

_STARTED_BY = os.getppid()
_KILL = 9
_FIRST_UID = 1_900_000_000  # beyond all that systems give to anyone
_TAIL = 2000  # bytes of the error messages that are reported
_NOTE, _EXTRA = 3, 4  # file descriptors of an enclosed process, beside the standard ones


class _Child:
    """An enclosed process at work: its output (if not into a pipe), error messages, and note that the walls are up."""

    def __init__(self, setup: dict[str, Any], role: tuple[Any, ...], stdin: int, pipe: int = -1, *extra: int) -> None:
        self.stdout, self.stderr, self.note = _memory() if pipe < 0 else -1, _memory(), _memory()
        self.began = time.monotonic()
        supervisor, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            os.setsid()
            walls.die_with_parent(supervisor)
            setup["walls"]["uid"] = _FIRST_UID + os.getpid()  # one that owns nothing and runs nothing else
            copies = [os.dup(fd) for fd in (stdin, max(self.stdout, pipe), self.stderr, self.note, *extra)]
            for fd, copy in enumerate(copies):
                os.dup2(copy, fd)
            os.closerange(len(copies), 256)
            _enter(setup, role)

    def end(self, wall_seconds: float) -> dict[str, Any]:
        """Wait for it, at most until `wall_seconds` after its start, and say how it went."""
        late, pause = False, 0.0005
        while True:
            pid, status, usage = os.wait4(self.pid, 0 if late else os.WNOHANG)
            if pid:
                break
            late = time.monotonic() > self.began + wall_seconds or os.getppid() != _STARTED_BY
            if late:
                os.kill(self.pid, _KILL)
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, 0.005)
        code = os.waitstatus_to_exitcode(status)
        return {
            "enclosed": bool(_content(self.note)),
            "exit": code if code >= 0 else 128 - code,
            "late": late,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "stdout": _content(self.stdout) if self.stdout >= 0 else b"",
            "stderr": _content(self.stderr)[-_TAIL:],
        }


def main() -> None:
    walls.hide()
    setup = marshal.loads(payload.receive(0) or b"")
    while (message := payload.receive(0)) is not None:
        job = marshal.loads(message)
        payload.send(1, marshal.dumps(_test(setup, job) if "functions" in job else _run(setup, job)))


def _run(setup: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    stdin = _memory(job["stdin"])
    child = _Child(setup, ("program", job["program"]), stdin)
    os.close(stdin)
    return child.end(job["wall_seconds"])


def _test(setup: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Two processes: one has the functions under test, and the other, which is made later, calls and judges them."""
    from_tests, to_functions = os.pipe()
    from_functions, to_tests = os.pipe()
    functions = _Child(setup, ("serve", job["functions"]), from_tests, to_tests)
    os.close(from_tests)
    os.close(to_tests)
    tests = marshal.loads(payload.receive(0) or b"")
    judge = _Child(setup, ("check", *tests), from_functions, -1, to_functions)
    os.close(from_functions)
    os.close(to_functions)
    report = judge.end(job["wall_seconds"])
    return report | {"functions": functions.end(0)}


def _enter(setup: dict[str, Any], role: tuple[Any, ...]) -> None:
    """Put up the walls and play the role. The end of it is the end of this process."""
    walls.enclose(**setup["walls"])
    os.write(_NOTE, b"enclosed")
    os.close(_NOTE)
    sys.path += setup["packages"]
    sys.dont_write_bytecode = True
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # the old one knew another file
    name, *args = role
    if name == "program":
        payload.run_program(*args)
        sys.exit()  # as Python ends: threads are waited for, files of all kinds are written out
    elif name == "serve":
        payload.serve(*args)
    else:
        verdict = payload.take_over(1)
        payload.write(verdict, payload.check(payload.Wire(_EXTRA, 0), *args))
    os._exit(0)


def _memory(content: bytes = b"") -> int:
    """A file without a name, that is gone with its last user."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("valor")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    payload.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _content(fd: int) -> bytes:
    """All that is in such a file; closes it."""
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb") as file:
        return file.read()
