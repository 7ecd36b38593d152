"""Requests of the native engine: those that have come, those that wait, and those that it is decoding."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from valor.errors import UserError
from valor.rollout.base import Abort, FinishReason, Output, Request, RequestSource

# Waiting requests join once this share of the row limit is free, so that their prefills are batched as well.
JOIN_SHARE = 0.25
# A prompt up to this long is cheaper to copy into each of its samples than to attend to separately.
SHARE_LENGTH = 32


@dataclass(slots=True)
class Row:
    """One sequence in decoding; its index in the engine's list is its slot in the cache."""

    request: Request
    prompt: int  # number of its prompt in the cache, -1 when that is part of its row
    stop_ids: frozenset[int]
    max_new: int
    uniforms: np.ndarray
    token_ids: list[int]  # of `so_far`, then its own
    log_probs: list[float]  # of its own
    routes: list[torch.Tensor]  # [n, C] of all tokens but the last, one part after another, where they are recorded
    stopped: bool = False  # whether the last token ends the row

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def columns(self) -> int:
        """Columns of its cache row in use: all tokens but the last, which has not been fed, less a shared prompt."""
        if self.prompt >= 0:
            return len(self.token_ids) - len(self.request.begun.token_ids)
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float], routes: torch.Tensor | None = None) -> None:
        """Append sampled tokens up to the one that ends the row. `routes` [n, C]: of the tokens before them."""
        stop, before = self.request.params.stop, len(self.token_ids)
        self.token_ids += token_ids
        for count, token in enumerate(token_ids, before + 1):
            if token in self.stop_ids or (stop is not None and stop.complete(self.token_ids[:count])):
                self.stopped = True
                del self.token_ids[count:]
                break
        self.log_probs += log_probs[: len(self.token_ids) - before]
        if routes is not None:
            self.routes.append(routes[: len(self.token_ids) - before])

    def finish_reason(self) -> FinishReason | None:
        if self.stopped:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_new else None


class Intake:
    """The requests of one `serve`, by weights of `version`: `pending` ones have come and not ended; `ended`: no more
    will come.

    UserError when a prompt leaves no room for a new token.
    """

    def __init__(self, source: RequestSource, max_model_len: int, version: int) -> None:
        self.source, self._max_model_len, self._version = source, max_model_len, version
        self.pending: list[Request] = []
        self.ended = False
        self.aborted = set[str]()  # names of pending requests
        self.poll(wait=True)

    def poll(self, *, wait: bool) -> Sequence[Request]:
        """What has come since the last call; `wait`: at least one, unless no more will come."""
        requests: list[Request] = []
        while not self.ended and (events := self.source.poll(wait=wait and not requests)) != []:
            self.ended = events is None
            requests += (event for event in events or () if isinstance(event, Request))
            self.aborted |= {event.request_id for event in events or () if isinstance(event, Abort)}
        for request in requests:
            if len(request.prompt_ids) >= self._max_model_len:
                raise UserError(
                    f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response: "
                    f"the model takes {self._max_model_len} tokens"
                )
        self.pending += requests
        return requests

    def finish(self, row: Row, reason: FinishReason) -> None:
        """Deliver what a row has sampled."""
        new_ids = row.token_ids[len(row.request.begun.token_ids) :]
        routes = torch.cat(row.routes) if row.routes else None
        self.deliver(row.request, row.request.output(new_ids, row.log_probs, reason, self._version, routes))

    def deliver(self, request: Request, output: Output) -> None:
        """Give an output to the request's receiver."""
        self.pending = [other for other in self.pending if other is not request]
        self.aborted.discard(request.request_id)
        # Tensors made by the receivers are theirs, and may need gradients later.
        with torch.inference_mode(False):
            if request.on_finish is not None:
                request.on_finish(output)


@dataclass(slots=True)
class Group:
    """Requests with the same images and known tokens: prompt, and response so far."""

    prompt_ids: tuple[int, ...]
    members: list[Request]

    @property
    def images(self) -> str:
        return self.members[0].images


class Waiting:
    """Groups that have not started, longest prompts first; at most `max_num_seqs` requests run at once."""

    def __init__(self, max_num_seqs: int) -> None:
        self._queue: list[Group] = []  # popped from the end
        self._max_num_seqs = max_num_seqs

    def add(self, requests: Sequence[Request]) -> None:
        """Queue further requests; those of one call that have equal prompts start together."""
        groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        for request in requests:
            key = request.images, request.known_ids
            groups.setdefault(key, Group(request.known_ids, [])).members.append(request)
        # The sort is stable, so equal lengths stay in the order in which they came.
        self._queue = sorted([*reversed(self._queue), *groups.values()], key=lambda g: -len(g.prompt_ids))[::-1]

    def remove(self, request_ids: Collection[str]) -> list[Request]:
        """Take out requests by name."""
        removed = [request for group in self._queue for request in group.members if request.request_id in request_ids]
        for group in self._queue:
            group.members = [request for request in group.members if request.request_id not in request_ids]
        self._queue = [group for group in self._queue if group.members]
        return removed

    def __bool__(self) -> bool:
        return bool(self._queue)

    def worth_sharing(self) -> bool:
        """Whether storing prompts apart from the samples that continue them saves more work than it makes."""
        samples = sum(len(group.members) for group in self._queue)
        return samples >= 2 * len(self._queue) and len(self._queue[-1].prompt_ids) > SHARE_LENGTH

    def can_join(self, active: int) -> bool:
        """Whether it is time to call `admit` while `active` rows are running."""
        free = self._max_num_seqs - active
        return bool(self._queue) and free >= self._max_num_seqs * JOIN_SHARE and self._room(active) > 0

    def admit(self, active: int) -> list[Group]:
        """Take the groups that may start beside `active` running rows, longest prompts first."""
        admitted: list[Group] = []
        while self._queue and (room := self._room(active)):
            group = self._queue[-1]
            admitted.append(Group(group.prompt_ids, group.members[:room]))
            del group.members[:room]
            if not group.members:
                self._queue.pop()
            active += room
        return admitted

    def _room(self, active: int) -> int:
        """How many of the next group may start: all or none, and when nothing else runs as many as there may be."""
        members, free = len(self._queue[-1].members), self._max_num_seqs - active
        return min(members, free) if members <= free or active == 0 else 0
