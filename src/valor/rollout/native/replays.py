"""Decode steps as CUDA graphs: captured once for each size, then launched as one.

A step of a small model is over a thousand kernels, which a GPU ends sooner than the host launches them. A graph repeats
them at the addresses that they had: all that changes from step to step is in tensors that stay where they are
(`SlotCache`, bucketed). Choosing tokens is no part of it: a few kernels, launched while the GPU computes the graph.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from valor.errors import out_of_memory
from valor.rollout.native.decoder import Decoder, trial
from valor.rollout.native.kv_cache import SlotCache

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""What repeats a function, and its result, which is overwritten each time."""

_GAP = {torch.float32: 1e-4}  # of log-probs of one step; the same kernels should have none
_GAP_BELOW = 0.05  # in less precision, where other kernels may have been chosen

logger = logging.getLogger(__name__)


class CUDACapture:
    """A `Capture` on a stream of its own. Graphs share memory, as none reads what another has left there."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._pool_user = torch.cuda.CUDAGraph()  # torch forgets a pool that no graph uses
        with torch.cuda.graph(self._pool_user, self._pool, self._stream, "thread_local"):
            self._any = torch.zeros(1, device="cuda")

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would free torch's unused reserve
            graph.capture_begin(self._pool, "thread_local")
            try:
                result = function()
            except Exception:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, result


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CUDACapture}  # by type of device


class Replays:
    """Steps of `decoder` over bucketed caches, as it computes them; `capture` is None where one has failed."""

    def __init__(self, decoder: Decoder, capture: Capture | None) -> None:
        self._decoder, self.capture = decoder, capture

    def __call__(self, input_ids: Tensor, position_ids: Tensor, cache: SlotCache) -> Tensor:
        """Logits [B, V] after tokens [B, 1], until the next call."""
        cache.fed[: len(input_ids)].copy_(input_ids[:, 0])
        size = len(cache.fed), cache.width
        if size in cache.captured:
            replay, logits, _ = cache.captured[size]
            replay()
        else:
            logits = self._decoder(cache.fed[:, None], position_ids, cache)
            self._record(cache, size)
        return logits[: len(input_ids)]

    def _record(self, cache: SlotCache, size: tuple[int, int]) -> None:
        """Capture the step that was just computed, whose kernels are loaded now, for those that follow."""
        if self.capture is None:
            return
        cache.forget()
        try:
            replay, logits = self.capture(lambda: self._decoder(cache.fed[:, None], cache.positions[:, None], cache))
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            self.capture = None
            _warn(str(error))
        else:
            cache.captured[size] = replay, logits, self._decoder.angle_table  # which a longer one may take the place of


def capture_for(decoder: Decoder, hf: Any) -> Capture | None:
    """How steps of a model are captured on its device, tried on one: its log-probs are compared with those of kernels
    launched one by one. None where that is not done; a warning where it fails."""
    weight = hf.get_input_embeddings().weight
    device = weight.device
    if device.type not in CAPTURES:
        return None
    try:
        capture = CAPTURES[device.type]()
        cache, _, ids = trial(decoder, len(weight), device, bucketed=True)
        step = Replays(decoder, capture)
        for fed in (ids[:, :1], ids[:, 1:2]):  # captured, and then repeated
            cache.advance()
            log_probs = step(fed, cache.positions[:, None], cache).float().log_softmax(-1)
        if step.capture is None:
            return None
        cache.forget()
        expected = decoder(fed, cache.positions[:, None], cache)
        gap = float((log_probs - expected.float().log_softmax(-1)).abs().max())
        most = _GAP.get(expected.dtype, _GAP_BELOW)
        reason = None if gap <= most else f"its log-probs differ by {gap:.2g}"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if out_of_memory(error):
            raise
        reason = str(error)
    if reason is None:
        return capture
    _warn(reason)
    return None


def _warn(reason: str) -> None:
    line = reason.strip().partition("\n")[0]
    logger.warning("decode steps are launched kernel by kernel, which is slow: no CUDA graph of one works (%s)", line)
