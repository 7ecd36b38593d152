"""Responses, told to whoever listens as soon as they are finished, before the batch of all of them is returned.

In one process the rollout worker and the listener meet directly. In a worker process of a cluster nobody listens but
the host, which keeps what it hears (`Kept`); the driver polls it and tells it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Finished(NamedTuple):
    """One response: the `sample_key` of its row, and its tokens."""

    key: tuple[int, ...]
    token_ids: list[int]


Listener = Callable[[Finished], None]
_listeners: list[Listener] = []


def hear_finished(listener: Listener) -> None:
    """Call `listener` with every response from now on."""
    _listeners.append(listener)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`hear_finished` inside the block only. What a cluster finishes last is returned before it could be told."""
    hear_finished(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell_finished(responses: Sequence[Finished]) -> None:
    """Pass these on to all listeners, in this thread."""
    for response in responses:
        for listener in _listeners:
            listener(response)


class Kept:
    """Listener that keeps what it hears until it is asked, in whichever thread."""

    def __init__(self) -> None:
        self._responses: deque[Finished] = deque()

    def __call__(self, response: Finished) -> None:
        self._responses.append(response)

    def take(self) -> list[Finished]:
        """What was heard since the last time."""
        return [self._responses.popleft() for _ in range(len(self._responses))]
