"""Micro-batches: which rows share a forward pass, by a token budget that shrinks where memory does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from valor.engines.distributed import max_over_ranks
from valor.errors import TrainingStopped


@dataclass(frozen=True)
class RowOrder:
    """The order in which rows are taken, `rows`, and how many of its tokens each shares with the row before it."""

    rows: Sequence[int]
    shared: Sequence[int]

    @staticmethod
    def by_length(lengths: Sequence[int]) -> RowOrder:
        """From long to short (ties in the given order), so that rows of similar length meet and padding is small."""
        return RowOrder(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)), [0] * len(lengths))


def plan_micro_batches(
    lengths: Sequence[int],
    order: RowOrder | None = None,
    *,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    packed: bool = False,
) -> list[list[int]]:
    """Groups of rows within `max_tokens` (rows x longest row; packed: tokens, shared ones once) and `max_rows`.

    A row longer than the budget gets a group to itself: no row is cut. The plan depends on lengths and order alone.
    """
    groups: list[list[int]] = []
    size, order = 0, order or RowOrder.by_length(lengths)
    for index, shared in zip(order.rows, order.shared, strict=True):
        group = groups[-1] if groups else []
        size += lengths[index] - shared if packed or not group else lengths[group[0]]
        fits = (max_tokens is None or size <= max_tokens) and (max_rows is None or len(group) < max_rows)
        if group and fits:
            group.append(index)
        else:
            groups.append([index])
            size = lengths[index]
    return groups


@dataclass
class TokenBudget:
    """The most tokens that a micro-batch of this rank may hold; None while memory has always sufficed."""

    limit: int | None = None
    retries: int = 0  # since they were last reported

    def within(self, max_tokens: int | None) -> int | None:
        """The smaller one of `max_tokens` and what has turned out to fit."""
        return min((limit for limit in (max_tokens, self.limit) if limit is not None), default=None)

    def take_metrics(self) -> dict[str, float]:
        """`oom_retries` and `token_budget_min` of what happened since the last call; empty if nothing did."""
        if not self.retries:
            return {}
        retries, self.retries = self.retries, 0
        return {"oom_retries": float(retries), "token_budget_min": float(self.limit or 0)}


class MicroBatches:
    """Rows in micro-batches, in their order. Ranks take turns together; one that has run out gets empty ones."""

    def __init__(
        self,
        lengths: Sequence[int],
        order: RowOrder,
        budget: TokenBudget,
        *,
        max_tokens: int | None,
        max_rows: int | None,
        packed: bool,
    ) -> None:
        self._lengths, self._order, self._budget, self._packed = lengths, order, budget, packed
        self._max_tokens = max_tokens
        self._groups = partial(plan_micro_batches, lengths, order, max_rows=max_rows, packed=packed)
        self._waiting: list[list[int]] = []
        self._plan()

    @property
    def last(self) -> bool:
        """Whether the present turn is the last one."""
        return len(self._waiting) == 1

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def present(self) -> list[int]:
        """The rows of this turn; empty where only other ranks have some left."""
        return self._waiting[0]

    @property
    def done(self) -> int:
        """Rows of finished turns."""
        return len(self._lengths) - sum(map(len, self._waiting))

    def advance(self) -> None:
        """The present turn is done on all ranks."""
        self._waiting = self._waiting[1:]

    def restart(self) -> None:
        """Begins again: the present rows did not fit, so micro-batches hold at most half as much from now on.
        TrainingStopped: it was one row."""
        lengths = [self._lengths[row] for row in self.present]
        longest = max(lengths, default=0)
        if len(self.present) < 2:
            raise TrainingStopped(
                f"out of memory in a micro-batch of one sample of {longest} tokens, which cannot be cut: lower "
                "data.max_response_length, set model.enable_gradient_checkpointing=true, fsdp_config.param_offload and "
                "optimizer_offload, or shard over more processes (trainer.n_gpus_per_node)"
            )
        shared = dict(zip(self._order.rows, self._order.shared, strict=True))
        tokens = sum(lengths) - sum(shared[row] for row in self.present[1:])
        self._budget.limit = max((tokens if self._packed else longest * len(lengths)) // 2, 1)
        self._budget.retries += 1
        self._plan()

    def _plan(self) -> None:
        groups = self._groups(max_tokens=self._budget.within(self._max_tokens))
        turns = max(1, max_over_ranks(len(groups)))  # one for an empty batch, too: its model has gathers to serve
        self._waiting = groups + [[]] * (turns - len(groups))
