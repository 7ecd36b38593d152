"""Requests to servers that are aborted, go on, or outlive their server."""

from collections.abc import Iterator, Sequence

import pytest
from fake_server import FakeServer
from test_rollout_server import WEIGHTS, settings, started

from interruptions import aborted, resumed, served
from valor.engines.distributed import init_process_group, leave_process_group
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.base import Abort, Output, Request, SamplingParams, Span, StopTexts
from valor.rollout.server import client as client_module
from valor.rollout.server.engine import ServerEngine

pytestmark = pytest.mark.slow

TOKENS = 40
FIRST = Request("first", [7, 8], SamplingParams(max_tokens=10), (5, 8))  # what happens, happens when it has ended


@pytest.fixture
def servers(monkeypatch) -> Iterator[list[FakeServer]]:
    """Two of them, at 10 ms a token."""
    monkeypatch.setattr(client_module, "_FIRST_PAUSE", 0.02)
    init_process_group("cpu")
    fakes = [FakeServer(), FakeServer()]
    for fake in fakes:
        fake.per_token = 0.01
    yield fakes
    for fake in fakes:
        fake.close()
    leave_process_group()


def requests(count: int = 4, **more: object) -> list[Request]:
    """In turn to the one and the other server."""
    params = SamplingParams(max_tokens=TOKENS, **more)
    return [Request(f"r{i}", [7, i], params, (5, i)) for i in range(count)]


def asked(servers: Sequence[FakeServer]) -> dict[int, list[dict]]:
    """What the servers have been asked, by the second token of the prompt."""
    bodies: dict[int, list[dict]] = {}
    for body in (body for fake in servers for body in fake.asked):
        bodies.setdefault(body["prompt"][1], []).append(body)
    return bodies


def test_an_aborted_sequence_goes_on_from_what_it_has(servers):
    engine = started(servers, max_num_seqs=3)
    _, *cut = served(engine, [FIRST, *requests()], aborted(requests()), at="first")
    assert {o.finish_reason for o in cut} == {"abort"}
    lengths = [len(o.token_ids) for o in cut]
    assert all(0 < n < TOKENS for n in lengths[:2]) and lengths[3] == 0  # the fourth waited for a place
    assert [o.spans for o in cut] == [(Span(n, 4),) if n else () for n in lengths]
    first = asked(servers)
    engine.sync_weights(WEIGHTS.items(), version=5)
    again = resumed(requests(), cut)
    for number, (output, had, n) in enumerate(zip(engine.generate(again), cut, lengths, strict=True)):
        assert output.token_ids[:n] == had.token_ids and len(output.token_ids) == len(output.log_probs) == TOKENS
        assert output.finish_reason == "length"
        assert output.spans == ((Span(n, 4), Span(TOKENS - n, 5)) if n else (Span(TOKENS, 5),))
        body = max(asked(servers)[number], key=lambda body: len(body["prompt"]))
        assert body["prompt"] == [7, number, *had.token_ids] and body["max_tokens"] == TOKENS - n
        assert n == 0 or body["seed"] != first[number][0]["seed"]
    # What goes on may be aborted again, before it has begun too.
    for fake in servers:
        fake.pause = 0.3
    assert [o.token_ids for o in served(engine, again, aborted(again))] == [o.token_ids for o in cut]


def test_a_server_that_cannot_abort_is_left_and_its_tokens_are_not_told(servers):
    engine = ServerEngine(settings(servers, server={"weight_updates": "none"}), eos_token_ids=[2])
    servers[0].aborts = False
    wanted = [Abort("r0"), Abort("r1"), Abort("nobody")]
    *cut, _ = served(engine, [*requests(), FIRST], lambda: wanted, at="first")
    assert (cut[0].token_ids, cut[0].finish_reason, cut[0].spans) == ([], "abort", ())
    assert 0 < len(cut[1].token_ids) < TOKENS and cut[1].finish_reason == "abort"
    assert [(len(o.token_ids), o.finish_reason) for o in cut[2:]] == [(TOKENS, "length")] * 2


def test_a_text_that_begins_before_an_abort_ends_the_sequence_behind_it(servers):
    engine = started(servers)

    def going_on(stop: StopTexts | None) -> Output:
        had = Output("r0", [9, 9, 8], [-1.0] * 3, "abort", (Span(3, 1),))
        return engine.generate(resumed(requests(1, stop=stop), [had]))[0]

    free = going_on(None)
    text = "".join(map(str, free.token_ids[2:5]))
    stop = StopTexts((text,), frozenset({free.token_ids[4]}), lambda ids: "".join(map(str, ids)))
    output = going_on(stop)
    assert (output.token_ids, output.finish_reason) == (free.token_ids[:5], "stop")
    assert output.spans == (Span(3, 1), Span(2, 4)) and len(output.log_probs) == 5


def test_a_server_that_was_started_anew_is_to_be_sent_the_weights_again(servers):
    engine = started(servers[:1])
    told: list[Output] = []
    work = [Request(f"r{i}", [7, i], SamplingParams(max_tokens=3), (5, i), told.append) for i in range(4)]
    # Unnoticed between two answers; in the middle of one, which is broken off.
    servers[0].described["weights"] = None
    with pytest.raises(WorkersReplaced, match=f"{servers[0].url} was started anew"):
        engine.generate(work)
    assert told == []
    assert engine.weights_version is None
    with pytest.raises(ValueError, match="no weights"):
        engine.generate(work)
    engine.sync_weights(WEIGHTS.items(), version=6)
    assert engine.weights_version == 6
    servers[0].described["weights"], servers[0].breaks_off = None, 2
    with pytest.raises(WorkersReplaced):
        engine.generate(work)
    engine.sync_weights(WEIGHTS.items(), version=6)
    # Others answer meanwhile.
    engine = started(servers)
    servers[1].described["weights"] = None
    assert {o.spans for o in engine.generate(work)} == {(Span(3, 4),)}
    assert engine.weights_version is None
    engine.sync_weights(WEIGHTS.items(), version=8)
    before = len(servers[1].asked)
    assert {o.spans for o in engine.generate(work)} == {(Span(3, 8),)} and len(servers[1].asked) > before


def test_a_connection_that_is_lost_costs_the_request_alone(servers):
    engine = started(servers[:1])
    servers[0].breaks_off = 1
    assert [len(o.token_ids) for o in engine.generate(requests())] == [TOKENS] * 4
    assert sorted(map(len, asked(servers).values())) == [1, 1, 1, 2]
    servers[0].breaks_off, servers[0].per_token = 100, 0.0
    with pytest.raises(TrainingStopped, match=f"{servers[0].url} breaks off the same request again and again"):
        engine.generate(requests())
