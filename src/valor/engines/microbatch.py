"""Micro-batches: which rows share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int | None = None, max_rows: int | None = None
) -> list[list[int]]:
    """Rows grouped so that a group's padded size, rows x longest row, stays within `max_tokens`.

    Rows are taken from long to short (ties in the given order), so that rows of similar length meet and padding is
    small. A row longer than the budget gets a group of its own: a row cannot be cut. `max_rows` bounds the rows of a
    group. The plan depends on the lengths alone.
    """
    for name, limit in (("max_tokens", max_tokens), ("max_rows", max_rows)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        group = groups[-1] if groups else []
        fits = (max_tokens is None or (len(group) + 1) * longest <= max_tokens) and (
            max_rows is None or len(group) < max_rows
        )
        if group and fits:
            group.append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def padding_share(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """The share of a plan's positions that hold padding, 0 to 1."""
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups if group)
    return 1.0 - sum(lengths) / padded if padded else 0.0
