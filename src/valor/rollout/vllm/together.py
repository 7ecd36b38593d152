"""Tensor-parallel ranks: the requests of the first rank's source reach the others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from valor.errors import TrainingStopped
from valor.rollout.base import Abort, Request, RequestSource, StopTexts

Event = Request | Abort


class BroadcastSource:
    """The first rank's source, for all ranks of `group`: what it polls is broadcast to the others (collective).

    `stop_texts`: those broadcast so far; each is sent once, because it brings a tokenizer. TrainingStopped in the other
    ranks where the source raises.
    """

    everywhere = True

    def __init__(self, source: RequestSource, group: dist.ProcessGroup, stop_texts: list[StopTexts]) -> None:
        self._source, self._group, self._stop_texts = source, group, stop_texts
        self._first = dist.get_process_group_ranks(group)[0]
        self.max_requests, self.max_tokens = source.max_requests, source.max_tokens

    def poll(self, *, wait: bool) -> Sequence[Event] | None:
        if dist.get_rank() != self._first:
            kind, new, numbered = self._broadcast()
            if kind == "error":
                raise TrainingStopped("generation has ended: the process that has its requests failed")
            self._stop_texts += new
            return None if kind == "end" else [_with_stop(event, self._stop_texts.__getitem__) for event in numbered]
        try:
            events = self._source.poll(wait=wait)
        except BaseException:
            self._broadcast("error")
            raise
        stops = [event.params.stop for event in events or () if isinstance(event, Request) and event.params.stop]
        new = [stop for stop in dict.fromkeys(stops) if stop not in self._stop_texts]
        self._stop_texts += new
        numbered = [_with_stop(event, self._stop_texts.index) for event in events or ()]
        self._broadcast("end" if events is None else "events", new, numbered)
        return events

    def _broadcast(self, kind: str = "", new: Sequence[StopTexts] = (), events: Sequence[Event] = ()) -> list[Any]:
        """The first rank's arguments, on every rank."""
        objects = [kind, new, events]
        dist.broadcast_object_list(objects, src=self._first, group=self._group)
        return objects


def _with_stop(event: Event, change: Callable[[Any], Any]) -> Event:
    """An event without its receiver, its stop texts replaced by their number or the reverse."""
    if isinstance(event, Abort):
        return event
    stop = event.params.stop
    return replace(event, on_finish=None, params=replace(event.params, stop=None if stop is None else change(stop)))
