"""Managers beside the plain one: a function of whole batches, and a grader behind an HTTP address."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from valor.config.reward import RewardConfig
from valor.errors import UserError
from valor.rewards.executor import Sample
from valor.rewards.manager import Graders, make_graders

BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    if "raise" in solution_strs: raise ValueError("no")
    if "few" in solution_strs: return [1.0]
    best = max(solution_strs, key=len)
    return [{"score": (s == best) + bonus, "size": len(solution_strs)} for s in solution_strs]
"""


def samples(*responses: str) -> list[Sample]:
    return [Sample("mine", response, "good", {"index": i}) for i, response in enumerate(responses)]


def test_a_function_of_whole_batches_is_called_once(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(BATCH)
    function = {"path": str(tmp_path / "whole.py"), "reward_kwargs": {"bonus": 0.5}}
    manager = make_graders(
        RewardConfig.model_validate(
            {
                "num_workers": 1,
                "error_score": -1.0,
                "custom_reward_function": function,
                "reward_manager": {"name": "batch"},
            }
        )
    )
    try:
        assert manager.grades_everything and not manager.one_by_one
        results = manager.score(samples("a", "aaa", "aa"))
        assert [r.score for r in results] == [0.5, 1.5, 0.5]
        assert all(r.components == {"size": 3} for r in results)
        raised = manager.score(samples("a", "raise"))
        assert [(r.score, "ValueError: no" in (r.error or "")) for r in raised] == [(-1.0, True)] * 2
        few = manager.score(samples("a", "few"))
        assert all("1 scores for 2 samples" in (r.error or "") for r in few)
        assert manager.score([]) == []
    finally:
        manager.close()


def test_a_function_of_single_samples_is_no_function_of_batches(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n")
    config = {"custom_reward_function": {"path": str(tmp_path / "single.py")}, "reward_manager": {"name": "batch"}}
    with pytest.raises(UserError, match="must take data_sources, solution_strs, ground_truths, extra_infos"):
        make_graders(RewardConfig.model_validate(config))


class Grader(BaseHTTPRequestHandler):
    """Replies as the response it is asked about says."""

    begun: ClassVar[list[float]] = []
    under_way = most = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        self.reply(405, b"")

    def do_POST(self) -> None:
        with self.lock:
            cls = type(self)
            cls.begun.append(time.monotonic())
            first = len(cls.begun) == 1
            cls.under_way += 1
            cls.most = max(cls.most, cls.under_way)
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = asked["solution_str"]
        if what == "hang":
            time.sleep(3)
        time.sleep(0.02)
        status = {"refuse": 400, "down": 503}.get(what, 503 if what == "again" and first else 200)
        value = {"score": float(what in (asked["ground_truth"], "again")), "source": asked["data_source"]}
        with self.lock:
            cls.under_way -= 1
        self.reply(status, json.dumps("odd" if what == "odd" else value).encode())

    def reply(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # the client did not wait

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Grader.begun, Grader.most, Grader.under_way = [], 0, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Grader)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/grade"
    server.shutdown()
    thread.join()
    server.server_close()


def remote(url: str, timeout: float = 20.0, **options: Any) -> Graders:
    config = {
        "reward_manager": {"name": "remote"},
        "remote": {"url": url, **options},
        "timeout": timeout,
        "error_score": -1.0,
    }
    return make_graders(RewardConfig.model_validate(config))


def test_a_server_grades(url: str) -> None:
    manager = remote(url, max_concurrent=2)
    try:
        manager.check(["mine"])
        results = manager.score(samples("again", *["good", "bad"] * 4, "refuse", "odd"))
    finally:
        manager.close()
    assert [r.score for r in results] == [1.0, *[1.0, 0.0] * 4, -1.0, -1.0]
    assert results[1].components == {"source": "mine"}
    assert "status 400" in (results[-2].error or "") and "'odd', not a number" in (results[-1].error or "")
    assert Grader.most == 2


@pytest.mark.alone
def test_a_server_that_hangs_or_is_down_costs_its_samples_and_one_timeout(url: str) -> None:
    manager = remote(url, timeout=1.5)
    start = time.monotonic()
    results = manager.score(samples("hang", "down", "hang"))
    elapsed = time.monotonic() - start
    manager.close()
    assert [(r.score, r.kind) for r in results] == [(-1.0, "timeout")] * 3
    assert "status 503" in (results[1].error or "")
    assert elapsed < 2.8


def test_requests_keep_to_the_pace(url: str) -> None:
    manager = remote(url, requests_per_second=20.0)
    results = manager.score(samples(*["good"] * 11))
    manager.close()
    assert all(r.score == 1.0 for r in results)
    assert Grader.begun[-1] - Grader.begun[0] > 0.4  # ten pauses of 50 ms, give or take the server's own


def test_no_server_is_a_mistake_before_the_run() -> None:
    manager = remote("http://127.0.0.1:9/grade")
    with pytest.raises(UserError, match=r"no grader at reward\.remote\.url=http://127"):
        manager.check([])
    manager.close()
