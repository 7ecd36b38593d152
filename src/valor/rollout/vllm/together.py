"""Ranks that generate together: what the first of them is asked for reaches the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from valor.errors import TrainingStopped
from valor.rollout.base import Abort, Request, RequestSource, StopTexts


class SentToAll:
    """The first process's source, for all that generate together: each of its answers is sent to the others.

    Collective. The others' sources are polled when the first one begins to give its engine weights. `stop_texts`: those
    that have been sent, since they come with a tokenizer. TrainingStopped in the other processes where the source
    raises.
    """

    everywhere = True

    def __init__(self, source: RequestSource, group: dist.ProcessGroup, stop_texts: list[StopTexts]) -> None:
        self._source, self._group, self._known = source, group, stop_texts
        self._first = dist.get_process_group_ranks(group)[0]
        self._announced = False
        self.max_requests, self.max_tokens = source.max_requests, source.max_tokens

    def announce_weights(self) -> None:
        """Called in each process when its engine is about to be given weights: the first tells the others."""
        if dist.get_rank() == self._first:
            self._exchange("weights", [], [])
        self._announced = True

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        if dist.get_rank() != self._first:
            return self._received()
        try:
            found = self._source.poll(wait=wait)
        except BaseException:
            self._exchange("error", [], [])
            raise
        stops = dict.fromkeys(one.params.stop for one in found or () if isinstance(one, Request) and one.params.stop)
        new = [stop for stop in stops if stop not in self._known]
        self._known += new
        self._exchange("end" if found is None else "", new, [self._packed(one) for one in found or ()])
        return found

    def _received(self) -> Sequence[Request | Abort] | None:
        said, new, packed = self._exchange("", [], [])
        while said == "weights":
            self._announced = False
            self._source.poll(wait=True)
            if not self._announced:
                raise ValueError("the first process gives its engine weights, this one's source has none for its own")
            said, new, packed = self._exchange("", [], [])
        if said == "error":
            raise TrainingStopped("generation has ended: the process that has its requests failed")
        self._known += new
        return None if said == "end" else [self._unpacked(*one) for one in packed]

    def _packed(self, request: Request | Abort) -> tuple[Request | Abort, int | None]:
        """Without what stays in its process, and the number of its stop texts."""
        if isinstance(request, Abort):
            return request, None
        stop = request.params.stop
        params = replace(request.params, stop=None)
        return replace(request, params=params, on_finish=None), None if stop is None else self._known.index(stop)

    def _unpacked(self, request: Request | Abort, stop: int | None) -> Request | Abort:
        if isinstance(request, Abort) or stop is None:
            return request
        return replace(request, params=replace(request.params, stop=self._known[stop]))

    def _exchange(self, *sent: Any) -> list[Any]:
        """What the first process sends."""
        objects = list(sent)
        dist.broadcast_object_list(objects, src=self._first, group=self._group)
        return objects
