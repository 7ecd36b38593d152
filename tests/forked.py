"""Python processes that start in a moment: forked from one that has imported once what all of them need."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

VALOR = "import sys\nfrom valor.cli import main\nsys.exit(main(sys.argv[1:]))"


class Forked:
    """A process of a `Forks`: the part of `subprocess.Popen` that tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self._code is None:
            self._code = self._forks.ask("poll", self.pid)
        return self._code

    def wait(self, timeout: float = 120.0) -> int:
        """The exit code, once there is one."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Only to one that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """The process that the others are forked from. It imports `modules` and nothing else, and has no threads."""

    def __init__(self, *modules: str, **environment: str) -> None:
        command, env = [sys.executable, __file__, *modules], os.environ | environment
        self._server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, code: str, *arguments: object, log: Path | str = os.devnull, cwd: Path | str = ".") -> Forked:
        """What `python -c CODE ARGUMENTS` does, its output in `log`."""
        return Forked(self, self.ask("start", code, [str(one) for one in arguments], str(log), os.path.abspath(cwd)))

    def ask(self, *request: Any) -> Any:
        """One line there, one line back."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End it: no process can be started any more."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def serve(modules: list[str]) -> None:
    """Answer requests, one a line, until there are no more."""
    del sys.path[0]  # the folder of this file, which another process would not have either
    with redirect_stdout(sys.stderr):  # where vLLM says what it has not found
        for module in modules:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all that is imported
    for line in sys.stdin:
        what, *more = json.loads(line)
        if what == "poll":
            pid, status = os.waitpid(more[0], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        elif (pid := os.fork()) == 0:
            os._exit(run(*more))
        else:
            print(pid, flush=True)


def run(code: str, arguments: list[str], log: str, cwd: str) -> int:
    """In the child: run `code` as a process of its own would; the exit code."""
    from multiprocessing.util import _exit_function

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, stream)
    os.chdir(cwd)
    faulthandler.enable()  # a process that a signal ends says where it was
    sys.argv = ["-c", *arguments]
    status: Any = 0
    try:
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    _exit_function()  # ends the processes that it has started, as every child of multiprocessing does
    sys.stdout.flush()
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    serve(sys.argv[1:])
