"""The SandboxFusion client against a small server that speaks its protocol and runs what it is sent."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from json_http import JsonHandler
from valor.config import RewardConfig
from valor.rewards import code
from valor.rewards.executor import Sample
from valor.rewards.manager import make_graders
from valor.sandbox import SandboxError


class Server(ThreadingHTTPServer):
    """Answers `POST /run_code` as SandboxFusion does; `troubles` are HTTP statuses that come first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.troubles: list[int] = []
        self.broken = ""
        self.running, self.most_running, self.lock = 0, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(JsonHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        request = self.request_json()
        with self.server.lock:
            self.server.requests.append(request | {"path": self.path})
            trouble = self.server.troubles.pop() if self.server.troubles else 200
            self.server.running += 1
            self.server.most_running = max(self.server.running, self.server.most_running)
        answer = {"status": "SandboxError", "message": self.server.broken} if self.server.broken else run(request)
        with self.server.lock:
            self.server.running -= 1
        self.reply(trouble, answer)


def run(request: dict[str, Any]) -> dict[str, Any]:
    assert request["language"] == "python"
    result: dict[str, Any] = {
        "status": "Finished",
        "return_code": None,
        "stdout": "",
        "stderr": "",
        "execution_time": 0,
    }
    try:
        command = [sys.executable, "-c", request["code"]]
        done = subprocess.run(
            command, input=request["stdin"], capture_output=True, text=True, timeout=request["run_timeout"]
        )
        result |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    except subprocess.TimeoutExpired:
        result["status"] = "TimeLimitExceeded"
    status = "Success" if result["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def settings(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox() -> str:
        raise AssertionError("code is run on this machine")

    monkeypatch.setattr(code, "strongest_level", no_sandbox)
    monkeypatch.setattr(code, "_settings", code.CodeSettings(60.0, server.url, max_concurrent=2, memory_mb=512))


SUM = {"inputs": ["1 2\n", "5 6\n", "0 0\n"], "outputs": ["3\n", "11\n", "0\n"], "time_limit": 29}
ADD = "print(sum(map(int, input().split())))"
SQUARE = {"test_list": ["assert square(2) == 4", "assert square(3) == 9"], "time_limit": 29}


def test_a_program_is_sent_once_for_each_input(server: Server) -> None:
    result = code.grade("apps", f"```python\n{ADD}\n```", SUM)
    assert (result["score"], result["passed"], result["verdict"]) == (1.0, 1.0, "passed")
    assert sorted(request["stdin"] for request in server.requests) == sorted(SUM["inputs"])
    assert all(request["path"] == "/run_code" for request in server.requests)
    for request in server.requests:
        assert (request["code"], request["memory_limit_MB"], request["run_timeout"]) == (ADD, 512, 29)
        assert not any(output in json.dumps(request) for output in ("11", "3\\n"))  # right outputs stay here
    assert server.most_running <= 2


def test_wrong_programs(server: Server) -> None:
    assert code.grade("apps", "print(3)", SUM)["passed"] == pytest.approx(1 / 3)
    assert "ZeroDivisionError" in code.grade("apps", "1 / 0", SUM)["verdict"]
    verdict = code.grade("apps", "while True: pass", SUM | {"time_limit": 1})["verdict"]
    assert verdict == "test 1 of 3: no end within 1 s"


def test_functions_and_tests_are_kept_apart_in_one_program(server: Server) -> None:
    result = code.grade("mbpp", "def square(x):\n    print('hello')\n    return x * x", SQUARE)
    assert (result["score"], result["verdict"]) == (1.0, "passed")
    assert len(server.requests) == 1
    assert code.grade("mbpp", "def square(x): return 4", SQUARE)["passed"] == 0.5
    truth = {
        "test": "def check(f):\n    assert f(2) == 4\n",
        "entry_point": "f",
        "prompt": 'def f(x):\n    """Square."""\n',
    }
    assert code.grade("humaneval", "    return x ** 2\n", truth)["score"] == 1.0
    assert code.grade("humaneval", "    return x\n", truth)["verdict"].startswith("AssertionError")


@pytest.mark.parametrize(
    "forgery",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "class A:\n    __eq__ = lambda s, o: True\ndef square(x): return A()",
        "print('00' * 20, flush=True)\ndef square(x): return 0",
        "import gc\ndef square(x):\n"
        "    tests = 'assert square(2)' + ' == %d' % 4\n"
        "    held = (o for o in gc.get_objects() if isinstance(o, (list, tuple)) and tests in o)\n"
        "    return x * x if any(held) else 0",
        "import os\nfor pid in ('self', os.getppid()):\n    for fd in range(9):\n        try:\n"
        "            os.write(os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY), b't2;i2;s0;'.hex().encode())\n"
        "        except OSError: pass\ndef square(x): return 0",
        "import __main__ as main\nmain.same = lambda *a: True\nmain.check = lambda *a: b't2;i2;s0;'\n"
        "def square(x): return 0",
    ],
)
def test_forgeries_fail_there_too(server: Server, forgery: str) -> None:
    assert code.grade("mbpp", f"```python\n{forgery}\n```", SQUARE)["passed"] == 0.0


def test_a_busy_server_is_asked_again_and_one_that_fails_is_an_error(server: Server) -> None:
    one = {"inputs": ["1 2\n"], "outputs": ["3\n"], "time_limit": 29}
    server.troubles = [503, 504]
    assert code.grade("apps", ADD, one)["score"] == 1.0 and len(server.requests) == 3
    server.troubles = [500]
    with pytest.raises(SandboxError, match="500"):
        code.grade("apps", ADD, one)
    server.broken = "no space left"
    with pytest.raises(SandboxError, match="SandboxError: no space left"):
        code.grade("apps", ADD, one)


def test_an_unreachable_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(code, "_settings", code.CodeSettings(60.0, address))
    start = time.monotonic()
    with pytest.raises(SandboxError, match=rf"{address}/run_code: .*refused"):
        code.grade("apps", ADD, SUM)
    assert time.monotonic() - start < 20.0


def test_the_address_may_be_that_of_run_code(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_settings", code.CodeSettings(60.0, f"{server.url}/run_code"))
    assert code.grade("apps", ADD, SUM)["score"] == 1.0
    assert {request["path"] for request in server.requests} == {"/run_code"}


def test_configuration_reaches_the_grader_processes(server: Server) -> None:
    config = RewardConfig.model_validate(
        {
            "num_workers": 2,
            "timeout": 60.0,
            "sandbox_fusion": {"url": server.url, "max_concurrent": 4, "memory_limit_mb": 256},
        }
    )
    manager = make_graders(config)
    try:
        results = manager.score([Sample("codecontests", ADD, SUM), Sample("codecontests", "print(3)", SUM)])
    finally:
        manager.close()
    assert [r.score for r in results] == [1.0, 0.0] and not any(r.error for r in results)
    assert len(server.requests) == 6 and {r["memory_limit_MB"] for r in server.requests} == {256}
    assert server.most_running <= 4
