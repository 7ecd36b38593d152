"""Prompts whose samples are on their way from the generators to the trainer, and how old they may become.

An age is counted in versions of the weights: the transfers to the generators since the oldest token was sampled.
"""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar


@dataclass(eq=False)
class Group:
    """A prompt, whose samples a derived class has.

    number: its rank in the order in which prompts were drawn. oldest: version of the weights that sampled its oldest
    token; while it is in flight, the version when it was begun. attempt: how often it was begun before.
    """

    number: int
    oldest: int = 0
    finished: bool = False
    attempt: int = 0


G = TypeVar("G", bound=Group)


class SampleQueue(Generic[G]):
    """Groups in flight and finished ones, `capacity` together, none older than `max_age` when it is trained on.

    What would become too old is dropped, to be begun again; or (`strategy` wait) the trainer waits for it.
    """

    def __init__(self, capacity: int, max_age: int, strategy: Literal["drop", "wait"]) -> None:
        self.capacity, self.max_age, self.strategy = capacity, max_age, strategy
        self.groups: list[G] = []
        self.num_dropped = 0

    @property
    def room(self) -> int:
        """How many further groups may be begun."""
        return max(0, self.capacity - len(self.groups))

    @property
    def num_finished(self) -> int:
        return sum(group.finished for group in self.groups)

    @property
    def num_in_flight(self) -> int:
        return len(self.groups) - self.num_finished

    def begin(self, group: G, version: int) -> None:
        """A group is in flight, and no token of it will be older than `version`."""
        group.oldest, group.finished = version, False
        if group not in self.groups:
            self.groups.append(group)

    def finish(self, group: G, oldest: int) -> None:
        group.oldest, group.finished = oldest, True

    def too_old(self, version: int) -> list[G]:
        """The groups that may not be trained on when the weights have this version; they count as dropped."""
        dropped = [group for group in self.groups if version - group.oldest > self.max_age]
        self.num_dropped += len(dropped)
        return dropped

    def has(self, wanted: int, next_version: int) -> bool:
        """Whether `wanted` groups are finished and, with strategy wait, none in flight will be too old at the weights'
        `next_version`."""
        in_flight = (group for group in self.groups if not group.finished)
        waits = self.strategy == "wait" and any(next_version - each.oldest > self.max_age for each in in_flight)
        return self.num_finished >= wanted and not waits

    def take(self, wanted: int) -> list[G]:
        """`wanted` finished groups, those of the oldest weights; in the order in which they were drawn."""
        finished = [group for group in self.groups if group.finished]
        oldest = sorted(finished, key=lambda group: (group.oldest, group.number))
        taken = sorted(oldest[:wanted], key=lambda group: group.number)
        self.groups = [group for group in self.groups if group not in taken]
        return taken
