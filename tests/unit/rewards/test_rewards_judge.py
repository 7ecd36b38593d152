"""A judge behind a real HTTP server that speaks the protocol: scores, retries, limits, and every kind of failure."""

import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

import pytest

from json_http import JsonHandler
from valor import http_client
from valor.config.reward import JudgeConfig
from valor.errors import UserError
from valor.rewards.judge import Judge, Question

Answer = Callable[[str], tuple[int, str]]  # from what was asked to a status and the judge's text


class FakeServer:
    """An OpenAI-compatible server whose answers a test decides; remembers requests and how many ran at once."""

    def __init__(self) -> None:
        self.answer: Answer = lambda asked: (200, "Fine. Score: 7")
        self.more: dict = {}  # of the message
        self.headers: dict[str, str] = {}
        self.reasons = iter(())  # why replies end, else none is given
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.reply(401 if self.headers.get("Authorization") == "Bearer wrong" else 200, {"data": []})

            def do_POST(self) -> None:
                request = self.request_json()
                with fake.lock:
                    fake.requests.append(request | {"path": self.path})
                    fake.keys.append(self.headers.get("Authorization"))
                    fake.at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake.at_once)
                try:
                    status, text = fake.answer(request["messages"][0]["content"])
                finally:
                    with fake.lock:
                        fake.at_once -= 1
                message = {"role": "assistant", "content": text, **fake.more}
                choice = {"message": message, "finish_reason": next(fake.reasons, None)}
                self.reply(status, text if isinstance(text, dict) else {"choices": [choice]}, fake.headers)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch) -> Iterator[FakeServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(http_client, "_FIRST_PAUSE", 0.01)
    fake = FakeServer()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def make(server: FakeServer, **more) -> Judge:
    return Judge(JudgeConfig(url=server.url, model="m", **more), error_score=-1.0)


def questions(n: int = 1) -> list[Question]:
    return [Question(f"task {i}", f"answer {i}") for i in range(n)]


def test_scores_come_back_in_order_and_no_more_than_allowed_run_at_once(server):
    def answer(asked: str) -> tuple[int, str]:
        time.sleep(0.02)
        number = asked.partition("[Answer]\nanswer ")[2].partition("\n")[0]
        return 200, f"A first thought, score: 9. No. Score: {number}"

    server.answer = answer
    results = make(server, concurrency=4).score(questions(10))
    assert [r.score for r in results] == [float(i) for i in range(10)]
    assert all(r.error is None and r.seconds > 0 for r in results)
    assert 2 <= server.most_at_once <= 4


def test_the_request_is_a_chat_completion(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    make(server, api_key_env="JUDGE_KEY", request={"temperature": 0.5}).score([Question("2+2?", "4", "four")])
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["temperature"]) == ("m", 0.5)
    asked = request["messages"][0]["content"]
    assert "2+2?" in asked and "\n4\n" in asked and 'Score: N"' in asked
    assert server.keys == ["Bearer secret"]


def test_fields_are_filled_once_and_braces_are_harmless(server):
    template = '{"task": "{prompt}", "truth": "{ground_truth}", "answer": "{response}"}'
    asked = make(server, prompt_template=template).ask(Question("{response} {0}", "{ground_truth}", 4))
    assert asked == '{"task": "{response} {0}", "truth": "4", "answer": "{ground_truth}"}'


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_refusal_is_tried_again(server, status):
    replies = iter([(status, ""), (status, ""), (200, "Score: 3")])
    server.answer = lambda asked: next(replies)
    (result,) = make(server, retries=2).score(questions())
    assert (result.score, result.error) == (3.0, None)


def test_a_busy_judge_says_when_to_come_again(server, monkeypatch):
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(http_client.asyncio, "sleep", sleep)
    replies = iter([(429, "slow down"), (429, "slow down"), (200, "Score: 3")])
    server.answer = lambda asked: next(replies)
    server.headers = {"Retry-After": "7"}
    assert make(server, retries=2).score(questions())[0].score == 3.0
    assert pauses == [7.0, 7.0]


@pytest.mark.parametrize(
    ("reply", "attempts", "reason"),
    [
        ((503, "busy"), 3, "status 503"),
        ((400, "bad"), 1, "status 400"),
        ((200, "I would rather not say."), 1, "no score in the reply: 'I would rather not say.'"),
        ((200, {"error": "overloaded"}), 1, 'judge: no chat completion: {"error": "overloaded"}'),
        ((200, {"choices": []}), 1, 'no chat completion: {"choices": []}'),
        ((200, [{"type": "text", "text": "Score: 4"}]), 1, "no chat completion: "),
        ((200, "Score: 1000000"), 1, "the score 1e+06 is outside 0 to 10"),
    ],
)
def test_a_failure_has_a_reason_and_the_error_score(server, reply, attempts, reason):
    server.answer = lambda asked: reply
    (result,) = make(server, retries=2).score(questions())
    assert result.score == -1.0 and result.error is not None and reason in result.error
    assert len(server.requests) == attempts


@pytest.mark.alone
def test_a_slow_judge_costs_its_own_sample_alone(server):
    ended = threading.Event()

    def answer(asked: str) -> tuple[int, str]:
        if "answer 1" in asked:
            ended.wait(60.0)
        return 200, "Score: 5"

    server.answer = answer
    results = make(server, timeout=2.0, retries=0).score(questions(3))
    ended.set()
    assert [r.score for r in results] == [5.0, -1.0, 5.0]
    assert results[1].error == "judge: no reply within 2 s"


def test_a_server_that_goes_away_is_a_failure_not_a_crash(server):
    server.http.shutdown()
    server.http.server_close()
    (result,) = make(server, retries=1).score(questions())
    assert result.score == -1.0 and result.error is not None and "Connect" in result.error


def test_one_that_is_closed_leaves_no_thread(server):
    before, end = set(threading.enumerate()), time.monotonic() + 5
    judge = make(server)
    judge.score(questions())
    assert set(threading.enumerate()) - before
    judge.close()
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_a_reply_that_was_cut_is_asked_for_again(server):
    server.answer, server.reasons = lambda asked: (200, "Score: 1"), iter(["length", "stop"])
    assert make(server, retries=1).score(questions())[0].score == 1.0
    server.reasons = iter(["length"] * 3)
    (result,) = make(server, retries=2).score(questions())
    assert result.score == -1.0 and len(server.requests) == 5
    assert (
        result.error == "judge: the reply was cut at its limit: raise max_tokens in reward.reward_model.judge.request"
    )


def test_thoughts_are_no_verdict(server):
    server.answer, server.more = lambda asked: (200, ""), {"reasoning_content": "Score: 9"}
    (result,) = make(server).score(questions())
    assert result.error is not None and "no score" in result.error
    server.answer = lambda asked: (200, "<think>Score: 9</think>\nScore: 2")
    assert make(server).score(questions())[0].score == 2.0
    server.answer = lambda asked: (200, "<think>Score: 9")
    assert make(server).score(questions())[0].score == -1.0


def test_the_range_of_scores_is_asked_for_and_told(server):
    judge = make(server, score_range=(-1, 1))
    assert "from -1 (worthless) to 1 (perfect)" in judge.ask(questions()[0])
    server.answer = lambda asked: (200, "Score: 7/10")
    assert judge.score(questions())[0].score == 0.7
    server.answer = lambda asked: (200, "Score: -3")
    assert judge.score(questions())[0].error == "judge: the score -3 is outside -1 to 1"


def test_a_template_may_ask_for_all_that_was_said(server):
    asked = make(server, prompt_template="{response}|{transcript}").ask(Question("p", "own", None, "own and told"))
    assert asked == "own|own and told"


def test_who_is_not_there_or_refuses_the_key_is_told_before_the_run(server, monkeypatch):
    make(server).check()
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(UserError, match=r"refuses the key .* OPENAI_API_KEY"):
        make(server).check()
    with pytest.raises(UserError, match=r"no judge at reward\.reward_model\.judge\.url=http://127\.0\.0\.1:9/v1"):
        Judge(JudgeConfig(url="http://127.0.0.1:9/v1", model="m"), error_score=0.0).check()


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_question_that_is_refused_is_told_before_the_run(server, status):
    """A model's wrong name, an address without its version, a field of the request that the server does not know."""
    server.answer = lambda asked: (status, {"message": "The model `m` does not exist."})
    with pytest.raises(UserError, match=rf"refuses a question \(status {status}: .*`m` does not exist.*judge\.model=m"):
        make(server).check()
    server.answer = lambda asked: (503, "busy")
    make(server).check()
