"""Which requests run together: samples of one prompt are grouped, prompts are sorted by length."""

from collections.abc import Sequence
from dataclasses import dataclass

from valor.rollout.base import Request

# Waiting requests join once this share of the row limit is free, so that their prefills are batched as well.
JOIN_SHARE = 0.25
# A prompt up to this long is cheaper to copy into each of its samples than to attend to separately.
SHARE_LENGTH = 32


@dataclass(slots=True)
class Group:
    """Requests with the same prompt."""

    prompt_ids: tuple[int, ...]
    members: list[Request]


class Waiting:
    """The queue of groups that have not started, longest prompts first; at most `max_num_seqs` requests run at once."""

    def __init__(self, max_num_seqs: int) -> None:
        self._queue: list[Group] = []  # popped from the end
        self._max_num_seqs = max_num_seqs

    def add(self, requests: Sequence[Request]) -> None:
        """Queue further requests; those of one call that have equal prompts start together."""
        groups: dict[tuple[int, ...], Group] = {}
        for request in requests:
            key = tuple(request.prompt_ids)
            groups.setdefault(key, Group(key, [])).members.append(request)
        # The sort is stable, so equal lengths keep the order in which they came.
        self._queue = sorted([*reversed(self._queue), *groups.values()], key=lambda g: -len(g.prompt_ids))[::-1]

    def __bool__(self) -> bool:
        return bool(self._queue)

    def worth_sharing(self) -> bool:
        """Whether keeping prompts apart from the samples that continue them saves more work than it makes."""
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
