"""Requests that end at texts, for every engine: three letters a token, so that texts lie across tokens."""

from dataclasses import replace

from valor.rollout.base import Output, Request, StopTexts


def decode(token_ids):
    return "".join(f"{token:03}" for token in token_ids)


def stopping_after(work: list[Request], free: list[Output], length: int) -> tuple[StopTexts, list[Request]]:
    """The requests with two texts at which to end: the ones that a first and a second sample have after eight tokens.

    They lie across `length` + 1 tokens. The third request may have just as many tokens as the second needs.
    """
    texts = []
    for output in free[:2]:
        written = decode(output.token_ids)
        texts.append(written[3 * 8 - 1 : 3 * (8 + length) + 1])  # from the end of one token to the start of another
    candidates = frozenset(token for token in range(1000) if decode([token])[0] in {text[-1] for text in texts})
    stop = StopTexts(tuple(texts), candidates, decode)
    ends = next(n for n in range(1, 21) if stop.complete(free[1].token_ids[:n]))
    stopping = [replace(one, params=replace(one.params, stop=stop)) for one in work]
    last = replace(stopping[1], params=replace(stopping[1].params, max_tokens=ends))
    return stop, [*stopping, last]


def assert_stopped(outputs: list[Output], free: list[Output], stop: StopTexts) -> None:
    """Each is the free sample up to the token that completes a text."""
    for output, whole in zip(outputs, [*free, free[1]], strict=True):
        ends = [
            n for n in range(1, len(whole.token_ids) + 1) if any(t in decode(whole.token_ids[:n]) for t in stop.texts)
        ]
        expected = whole.token_ids[: ends[0]] if ends else whole.token_ids
        assert output.token_ids == expected
        assert len(output.log_probs) == len(expected) == sum(span.num_tokens for span in output.spans)
        assert max(abs(a - b) for a, b in zip(output.log_probs, whole.log_probs, strict=False)) < 1e-4
        assert output.finish_reason == ("stop" if ends else whole.finish_reason)
    assert [output.finish_reason for output in (*outputs[:2], outputs[-1])] == ["stop"] * 3
    assert len(outputs[0].token_ids) < len(free[0].token_ids)
