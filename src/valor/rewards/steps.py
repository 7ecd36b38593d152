"""Rewards by step: what parts of a response have earned, and the tokens on which that lands."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any

Place = int | tuple[int, int]
"""A token of the response, counted from 0; or a span of its text: the first character, and the one after the last."""
Step = tuple[Place, float]
Decode = Callable[[Sequence[int]], str]


def as_steps(value: Any) -> tuple[Step, ...]:
    """What a grader returned as `step_rewards`. Raises ValueError when it is no list of (place, number)."""
    try:
        steps = tuple((_span(at) if hasattr(at, "__iter__") else index(at), float(reward)) for at, reward in value)
    except (TypeError, ValueError):
        raise ValueError(
            f"the grader returned {value!r:.60} as step_rewards: a list of (token, reward) or ((start, end), reward)"
        ) from None
    if not all(math.isfinite(reward) for _, reward in steps):
        raise ValueError("the grader returned a step reward that is not finite")
    return steps


def _span(bounds: Any) -> tuple[int, int]:
    start, end = map(index, bounds)
    return start, end


def scaled(steps: Sequence[Step], weight: float) -> tuple[Step, ...]:
    return tuple((position, weight * reward) for position, reward in steps)


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    """Spans of the steps of a text: each ends with a separator, the last one with the text. What is white space alone
    is part of the step before it."""
    parts = text.split(separator)
    ends = list(accumulate(len(part) + len(separator) for part in parts))
    ends = [end for end, part in zip(ends, parts, strict=True) if part.strip()]
    ends = [min(end, len(text)) for end in ends]
    return list(zip([0, *ends], ends, strict=False))


def last_token(end: int, ids: Sequence[int], text: str, decode: Decode) -> int:
    """The token with which character `end` - 1 of `text` is written, by decoding prefixes of `ids`.

    A character of several tokens stands with the last of them. Raises ValueError: the tokens do not spell the text.
    """
    token = bisect_left(range(1, len(ids) + 1), True, key=lambda n: decode(ids[:n])[:end] == text[:end])
    if token == len(ids):
        raise ValueError("step_rewards: the tokens of the response do not spell the text that was graded")
    return token


def on_tokens(
    steps: Sequence[Step], parts: Iterable[tuple[int, Sequence[int], str]], decode: Decode, between: int = 0
) -> list[tuple[int, float]]:
    """The steps with the token that completes each span in the place of the span.

    `parts` of the graded text, with `between` characters between them: of each its first token, its tokens, and its
    text: all that they spell, or a part of it, else a span lies on its last token. Raises ValueError: a span is not in
    the text.
    """
    parts, on_token = list(parts), list[tuple[int, float]]()
    ends = list(accumulate(len(text) + between for _, _, text in parts))
    for position, reward in steps:
        if not isinstance(position, int):
            start, end = position
            number = bisect_left(ends, end)
            if not 0 <= start < end or number == len(ends):
                size = ends[-1] - between if ends else 0
                raise ValueError(f"step_rewards: there are no characters {start} to {end} in a response of {size}")
            first, ids, text = parts[number]
            spelt = decode(ids)
            begin = spelt.find(text)
            within = begin + min(end - ends[number] + len(text) + between, len(text))
            position = first + (last_token(within, ids, spelt, decode) if begin >= 0 and within > 0 else len(ids) - 1)
        on_token.append((position, reward))
    return on_token


def token_rewards(steps: Sequence[Step], rows: Sequence[Sequence[int]], decode: Decode) -> list[list[float]]:
    """The steps' rewards on the tokens of an episode's rows; those on one token add up.

    Tokens count through all rows, observations too; the text is that of the rows, one behind the other. Raises
    ValueError: a place is not in the response.
    """
    firsts = list(accumulate(map(len, rows), initial=0))
    rewards = [0.0] * firsts[-1]
    for token, reward in on_tokens(steps, zip(firsts, rows, map(decode, rows), strict=False), decode):
        if not 0 <= token < len(rewards):
            raise ValueError(f"step_rewards: there is no token {token} in a response of {len(rewards)}")
        rewards[token] += reward
    return [rewards[first:end] for first, end in pairwise(firsts)]
