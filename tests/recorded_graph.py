"""A CUDA graph that is not there: operations are recorded as a capture would, and repeated on the tensors they had.

What a captured step reads must lie where it lay, or a repetition reads what has been left there. As in a capture, an
operation that the host waits for, or that reads a tensor of the host, is an error, and results hold no numbers until
the first repetition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from posed_device import _WAITING, Posed

aten = torch.ops.aten


def _address(x: Tensor) -> int:
    return (x.held if isinstance(x, Posed) else x).untyped_storage().data_ptr()


class RecordedGraph(TorchDispatchMode):
    """Records inside of a `with`; `replay` repeats. posed: tensors of a device have to be posed ones."""

    def __init__(self, *, posed: bool = False) -> None:
        super().__init__()
        self._posed = posed
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        host = self._posed and any(x.dim() and not isinstance(x, Posed) for x in inputs)
        if func in _WAITING or host:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **kwargs)
        present = {_address(x) for x in inputs}
        fresh = [(i, x) for i, x in enumerate(pytree.tree_leaves(out)) if isinstance(x, Tensor)]
        self._calls.append((func, args, kwargs, [(i, x) for i, x in fresh if _address(x) not in present]))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            out = pytree.tree_leaves(func(*args, **kwargs))
            for index, x in made:
                x.copy_(out[index])


class Captures:
    """A `Capture` by recorded graphs; `graphs` holds all of them. fails: asked before the capture of that number."""

    def __init__(self, *, posed: bool = False, fails: Callable[[int], Exception | None] = lambda number: None) -> None:
        self._posed, self._fails = posed, fails
        self.graphs: list[RecordedGraph] = []

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if error := self._fails(len(self.graphs)):
            raise error
        graph = RecordedGraph(posed=self._posed)
        with graph:
            result = function()
        result.fill_(float("nan"))
        self.graphs.append(graph)
        return graph.replay, result
