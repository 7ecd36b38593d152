"""How a call on a role reaches its ranks: a marker on the method, read by whichever controller runs it.

Workers only declare; `valor.controller` acts. So the same class runs in-process, in a unit test and under Ray.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Mode = Literal["dp", "all"]
_Function = TypeVar("_Function", bound=Callable)


@dataclass(frozen=True)
class Dispatch:
    """What `dispatch` has marked a method with."""

    mode: Mode
    keep_together: str | None
    reads: tuple[str, ...]
    stays: tuple[str, ...]
    light: bool
    sent_weights: bool


def dispatch(
    mode: Mode,
    *,
    keep_together: str | None = None,
    reads: Sequence[str] = (),
    stays: Sequence[str] = (),
    light: bool = False,
    sent_weights: bool = False,
) -> Callable[[_Function], _Function]:
    """Mark a worker method.

    `dp`: the first argument is a Batch whose rows are shared out over the ranks (any number of rows, balanced by
    tokens); a Batch result comes back in the given row order, any other result must be equal on all ranks (metrics
    are reduced by the worker) and rank 0's is returned. `keep_together` names an object column: rows with the same
    value go to the same rank (samples of a prompt share their prefill). `reads`: the columns that it needs, if not all:
    no others travel. `stays`: columns [B, T] of the result that the caller need not read: where ranks are processes of
    their own they stay in the object store, and the caller gets references.

    `all`: every rank gets the same arguments; rank 0's result is returned.

    `sent_weights`: it uses weights that were sent before, so a new process cannot repeat the call.

    `light`: it answers a question and computes nothing, so its memory is not measured.
    """

    def mark(function: _Function) -> _Function:
        marker = Dispatch(mode, keep_together, tuple(reads), tuple(stays), light, sent_weights)
        function.valor_dispatch = marker  # type: ignore[attr-defined]
        return function

    return mark


def dispatch_of(cls: type, method: str) -> Dispatch:
    """The marker of `cls.method`; AttributeError names methods that are not meant to be called from outside."""
    function = getattr(cls, method)
    marker = getattr(function, "valor_dispatch", None)
    if marker is None:
        raise AttributeError(f"{cls.__name__}.{method} has no dispatch marker, so it cannot be called through a group")
    return marker
