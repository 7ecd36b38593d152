"""How a call on a role reaches its ranks: a marker on the method, read by whichever controller runs it.

Workers only declare; `valor.controller` acts. So the same class runs in-process, in a unit test and under Ray.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

_Function = TypeVar("_Function", bound=Callable)


@dataclass(frozen=True)
class Dispatch:
    """Marks a worker method: `@Dispatch("dp")`.

    mode `dp`: the first argument is a Batch whose rows are shared out over the ranks (any number of rows, balanced by
    tokens); a Batch result comes back in the given row order, any other result must be equal on all ranks (metrics
    are reduced by the worker) and rank 0's is returned. mode `all`: every rank gets the same arguments; rank 0's result
    is returned.

    keep_together names an object column: rows with the same value go to the same rank (samples of a prompt share their
    prefill). reads: the columns that it needs, if not all: no others travel. stays: columns [B, T] of the result that
    the caller need not read: where ranks are processes of their own they stay in the object store, and the caller gets
    references. light: a query without computation, whose memory is not measured. sent_weights: it uses weights that
    were sent before, so a new process cannot repeat the call.
    """

    mode: Literal["dp", "all"]
    keep_together: str | None = None
    reads: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    light: bool = False
    sent_weights: bool = False

    def __call__(self, function: _Function) -> _Function:
        function.valor_dispatch = self  # type: ignore[attr-defined]
        return function


def dispatch_of(cls: type, method: str) -> Dispatch:
    """The marker of `cls.method`; AttributeError names methods that are not meant to be called from outside."""
    marker = getattr(getattr(cls, method), "valor_dispatch", None)
    if marker is None:
        raise AttributeError(f"{cls.__name__}.{method} has no dispatch marker, so it cannot be called through a group")
    return marker
