"""The server engine and its checks against a server that misbehaves as told."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fake_server import DESCRIBED, LOGITS, FakeServer, tokenizer

from valor.config import RolloutConfig
from valor.engines.distributed import init_process_group, leave_process_group
from valor.errors import TrainingStopped, UserError
from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.server import client as client_module
from valor.rollout.server import fleet as fleet_module
from valor.rollout.server.checks import check_server
from valor.rollout.server.engine import ServerEngine
from valor.rollout.server.fleet import Fleet

pytestmark = pytest.mark.slow

KEY = "VALOR_TEST_KEY"


@pytest.fixture
def servers(monkeypatch) -> Iterator[list[FakeServer]]:
    """Two of them; a server that is away is waited for half a second."""
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setattr(client_module, "_PATIENCE", 0.5)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE", 0.02)
    init_process_group("cpu")
    fakes = [FakeServer(), FakeServer()]
    yield fakes
    for fake in fakes:
        fake.close()
    leave_process_group()


def settings(servers: list[FakeServer], *, server: dict | None = None, **more: object) -> RolloutConfig:
    section = {"base_url": [s.url for s in servers], "model": "m", "api_key_env": KEY, "timeout": 5.0} | (server or {})
    return RolloutConfig(**({"name": "server", "server": section, "dtype": "float32", "max_model_len": 56} | more))


def requests(count: int, **params: float) -> list[Request]:
    """Two samples of each prompt."""
    return [Request(f"r{i}", [7, i // 2], SamplingParams(max_tokens=3, **params), (5, i)) for i in range(count)]


WEIGHTS = {"a": torch.randn(30, 4), "b": torch.randn(7, dtype=torch.float64), "step": torch.arange(3)}


def started(servers: list[FakeServer], **more: object) -> ServerEngine:
    engine = ServerEngine(settings(servers, **more), eos_token_ids=[2])
    engine.sync_weights(WEIGHTS.items(), version=4)
    return engine


def test_requests_say_everything_and_samples_of_a_prompt_share_a_server(servers):
    engine = started(servers, max_num_seqs=3)
    for fake in servers:
        fake.pause = 0.02
    finished: list[Output] = []
    work = [replace(one, on_finish=finished.append) for one in requests(12, temperature=0.5, top_k=4)]
    outputs = engine.generate(work)
    assert [o.request_id for o in outputs] == [r.request_id for r in work]
    assert sorted(map(id, finished)) == sorted(map(id, outputs))
    norm = torch.tensor(LOGITS).div(0.5).logsumexp(0).item()
    for output in outputs:
        assert output.finish_reason == "length"
        assert output.log_probs == pytest.approx([LOGITS[t] / 0.5 - norm for t in output.token_ids])
    assert sum(fake.most_at_once for fake in servers) >= 3
    assert all(1 <= fake.most_at_once <= 3 for fake in servers)
    first, second = ({body["prompt"][1] for body in fake.asked} for fake in servers)
    assert first | second == set(range(6)) and not first & second, "samples of a prompt went to both"
    assert min(len(first), len(second)) >= 2  # who answers faster gets more
    body = servers[0].asked[0]
    expected = {"top_p": 1.0, "top_k": 4, "stop_token_ids": [2], "ignore_eos": True, "max_tokens": 3, "min_p": 0.0}
    assert body.items() >= {**expected, "temperature": 0.5, "repetition_penalty": 1.0, "model": "m"}.items()
    seeds = [body["seed"] for fake in servers for body in fake.asked]
    assert len(set(seeds)) == 12
    engine.generate(work)
    assert sorted(body["seed"] for fake in servers for body in fake.asked) == sorted(seeds * 2)


def test_turns_of_an_episode_share_a_server(servers):
    """Also where the second turn has the prompt of another episode's first one."""
    first = [Request(f"r{i}", [7, i], SamplingParams(max_tokens=3), (5, 1, i)) for i in range(4)]
    later = [
        Request(f"r{i}.{t}", [7, i + 1, 9, t], SamplingParams(max_tokens=3), (5, 1, i, t))
        for i in range(4)
        for t in (1, 2)
    ]
    started(servers).generate([*first, *later])
    asked = [{tuple(body["prompt"][1:]) for body in fake.asked} for fake in servers]
    of_episode = [{(i,), (i + 1, 9, 1), (i + 1, 9, 2)} for i in range(4)]
    assert asked == [of_episode[0] | of_episode[2], of_episode[1] | of_episode[3]]


def test_one_that_breaks_off_and_hangs_holds_nobody_up(servers, monkeypatch):
    """Its requests go to the other one, and nobody waits for it to say which weights it has."""
    monkeypatch.setattr(fleet_module, "_LOOK_SECONDS", 1e9)
    engine, go_on = started(servers), threading.Event()
    servers[0].breaks_off = 1000
    servers[0].valor_describe = lambda: go_on.wait(20) or {}
    began = time.monotonic()
    try:
        assert len(engine.generate(requests(12))) == 12
        assert time.monotonic() - began < 3.0
    finally:
        go_on.set()


def test_prompts_are_not_kept():
    """Of 100,000 of them it is remembered which server has them."""
    fleet = Fleet(RolloutConfig(name="server", server={"base_url": ["http://a/v1", "http://b/v1"], "model": "m"}), [])
    tracemalloc.start()
    try:
        for number in range(50):
            home = fleet.choose(Request("first", [number] * 50_000, seed=(5, number)))
            assert fleet.choose(Request("second", [number] * 50_000, seed=(6, number))) == home
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000


def test_weights_travel_in_files_that_do_not_stay(servers, tmp_path):
    engine = started(servers, server={"weights_dir": str(tmp_path)}, dtype="bfloat16")
    assert engine.weights_version == 4 and not list(tmp_path.iterdir())
    total = 0
    for name, tensor in WEIGHTS.items():
        sent = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert all(torch.equal(fake.received[name], sent) for fake in servers)
        total += int(sent.view(torch.int16 if tensor.is_floating_point() else torch.int64).long().sum())
    assert engine.weights_checksum == total


def test_weights_that_are_not_there_stop_the_run(servers, monkeypatch):
    engine = ServerEngine(settings(servers), eos_token_ids=[2])
    with pytest.raises(ValueError, match="no weights"):
        engine.generate(requests(1))
    engine.sync_weights(WEIGHTS.items(), version=1)
    servers[1].described["weights"] = "another run's"
    with pytest.raises(TrainingStopped, match=f"{servers[1].url} no longer holds the weights"):
        engine.generate(requests(4))
    for reply, words in (({"checksum": "1"}, "holds 1, .* was sent"), ({"error": "ValueError: no"}, "ValueError: no")):
        monkeypatch.setattr(servers[0], "valor_update", lambda *args, reply=reply: reply)
        with pytest.raises(TrainingStopped, match=f"{servers[0].url} has not taken weights 3: .*{words}"):
            engine.sync_weights(WEIGHTS.items(), version=3)
        assert engine.weights_version is None
    keeps = ServerEngine(settings(servers, server={"weight_updates": "none"}), eos_token_ids=[2])
    assert len(keeps.generate(requests(4))) == 4


def test_a_server_that_stumbles_is_asked_again_and_one_that_is_gone_stops_the_run(servers):
    engine = started(servers, server={"timeout": 0.5})
    servers[0].replies = [503, 429, 500]
    assert len(engine.generate(requests(4))) == 4
    servers[0].halves = 2
    assert len(engine.generate(requests(4))) == 4
    servers[0].replies = [400]
    with pytest.raises(TrainingStopped, match=f"{servers[0].url}/completions failed: status 400: .*sorry, 400"):
        engine.generate(requests(4))
    servers[1].with_tokens = False
    with pytest.raises(TrainingStopped, match=f"the rollout server at {servers[1].url} is no completion with token"):
        engine.generate(requests(4))
    servers[1].with_tokens, servers[1].longest = True, 2
    with pytest.raises(TrainingStopped, match=f"{servers[1].url} cut a response of up to 3 tokens at 2: "):
        engine.generate(requests(4))
    servers[1].longest, servers[1].pause = 1000, 2.0
    assert len(engine.generate(requests(4))) == 4  # by the other one
    alone = started(servers[1:], server={"timeout": 0.5})
    with pytest.raises(TrainingStopped, match=f"{servers[1].url}/completions failed: no answer within 0.5 s"):
        alone.generate(requests(4))
    servers[1].close()
    gone = f"{servers[1].url.removesuffix('/v1')}/.* failed: ConnectError.*: start it again"
    with pytest.raises(TrainingStopped, match=gone):
        alone.generate(requests(4))


def test_servers_inside_the_network_are_asked_past_the_proxy(servers, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    check(servers[0])
    assert len(started(servers).generate(requests(2))) == 2


def check(fake: FakeServer, **more: object) -> None:
    check_server(settings([fake], **more), tokenizer)


def test_a_server_that_will_do(servers):
    check(servers[0], temperature=0.7)
    check(servers[0])
    servers[0].mode = "raw_logprobs"
    check(servers[0])
    check(servers[0], top_p=0.9)
    servers[0].described = None
    check(servers[0], server={"weight_updates": "none"}, dtype="bfloat16")


@pytest.mark.parametrize(
    ("fault", "more", "words"),
    [
        ({"models": [{"id": "a"}, {"id": "b"}]}, {}, "serves a, b, not 'm': set .*server.model"),
        (
            {"models": [{"id": "m", "max_model_len": 50}]},
            {},
            "takes 50 tokens, .*max_model_len is 56: .*--max-model-len 56",
        ),
        ({"with_tokens": False}, {}, "returns no token ids"),
        ({"encode": lambda text: {"input_ids": [1, 2]}}, {}, "has another tokenizer .*2 tokens of a probe"),
        ({"mode": "raw_logprobs"}, {"temperature": 0.7}, "--logprobs-mode processed_logprobs"),
        ({"mode": "processed_logprobs"}, {"top_k": 5}, "--logprobs-mode raw_logprobs"),
        ({"mode": "processed_logits"}, {}, "gives log-probs above 0"),
        ({"replies": [400]}, {}, "refuses a completion .status 400.: .*sorry"),
        ({"key": "secret"}, {}, f"refuses the key .status 401.: .* {KEY}"),
        ({"described": None}, {}, "takes no weights: .*VLLM_SERVER_DEV_MODE=1 .*WeightReceiver.*weight_updates=none"),
        ({}, {"dtype": "bfloat16"}, "computes in float32: start it with --dtype bfloat16, or set .*dtype=float32"),
        ({"described": DESCRIBED | {"parts": 2}}, {}, "has replicas"),
        ({"described": DESCRIBED | {"ends_in_parts": True}}, {}, "on a CPU, .*: .* --no-enable-chunked-prefill"),
    ],
)
def test_what_a_server_lacks_is_said_in_one_line(fault, more, words, servers, monkeypatch):
    for name, value in fault.items():
        setattr(servers[0], name, value)
    with pytest.raises(UserError, match=f"the server at .*{servers[0].url} .*{words}") as raised:
        check(servers[0], **more)
    assert "\n" not in str(raised.value)
    if fault == {"key": "secret"}:
        monkeypatch.setenv(KEY, "secret")
        check(servers[0])


def test_an_address_without_a_server(servers):
    with pytest.raises(UserError, match=r"has no list of models \(status 404\): the address usually ends in /v1"):
        check(servers[0], server={"base_url": servers[0].url.removesuffix("/v1")})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(UserError, match=f"no server answers at .*base_url={address}: ConnectError"):
        check(servers[0], server={"base_url": address})
