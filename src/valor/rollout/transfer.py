"""Weights on their way to rollout processes of their own: broadcast in buckets, compared bit for bit at the end."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]

TIMEOUT = timedelta(minutes=30)
MEETING = timedelta(seconds=20)  # who is not there by then has died
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's elements read as integers, an int64 scalar on its device.

    It adds up over the parts of a tensor, and padding with zeros changes nothing: merging, splitting and transposing
    weights leaves the sum over a model as it is.
    """
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)


class WeightChannel:
    """From one process (rank 0) to all others of a group of its own: gloo between CPUs, nccl between GPUs.

    Making it, and every transfer, is collective over its `size` processes, which meet at `store` (torch.distributed's);
    whichever process groups they are in otherwise stay as they are.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        self._group = backend(store, rank, size, TIMEOUT if device.type == "cuda" else MEETING)
        if device.type != "cuda":  # gloo has met by now, nccl does in the first transfer
            self._group._set_default_timeout(TIMEOUT)
        self._store = store  # the sender's is the server: it has to live as long
        self._device = device

    def send(self, weights: NamedTensors, *, dtype: torch.dtype, bucket_bytes: int) -> int:
        """Send all of `weights`, floating-point ones as `dtype`; returns the checksum of what was sent.

        On failure `weights` is still exhausted: other processes may take part in gathering it.
        """
        weights = iter(weights)
        total = torch.zeros((), dtype=torch.int64, device=self._device)  # wraps around, as all sums of bits here
        try:
            for bucket in buckets(weights, dtype, self._device, bucket_bytes):
                flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
                shapes = [(name, list(tensor.shape)) for name, tensor in bucket]
                self._send_header({"dtype": str(flat.dtype).removeprefix("torch."), "shapes": shapes})
                self._broadcast(flat)
                total += checksum(flat)
        except BaseException as error:
            with suppress(RuntimeError):  # the receivers are waiting, unless they are gone
                self._send_header({"failed": f"{type(error).__name__}: {error}"})
            deque(weights, maxlen=0)
            raise
        self._send_header({"checksum": int(total)})
        return int(total)

    def receive(self, take: Callable[[NamedTensors], int | None]) -> None:
        """Hand the tensors to `take` as they arrive, which returns the checksum of its weights then.

        RuntimeError when that is not the sender's, or when the sender gave up.
        """
        end: dict[str, Any] = {}
        incoming = self._incoming(end)
        try:
            received = take(incoming)
        finally:
            for _ in incoming:  # the sender does not know who has given up
                pass
        if received != end["checksum"]:
            raise RuntimeError(f"the rollout engine's weights add up to {received}, those sent to {end['checksum']}")

    def _incoming(self, end: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        while "shapes" in (header := self._receive_header()):
            sizes = [torch.Size(shape) for _, shape in header["shapes"]]
            counts = [size.numel() for size in sizes]
            flat = torch.empty(sum(counts), dtype=getattr(torch, header["dtype"]), device=self._device)
            self._broadcast(flat)
            parts = flat.split(counts)
            for (name, _), size, part in zip(header["shapes"], sizes, parts, strict=True):
                yield name, part.view(size)
        if "failed" in header:
            raise RuntimeError(f"the actor could not send its weights: {header['failed']}")
        end |= header

    def _send_header(self, header: dict[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self._device)
        self._broadcast(torch.tensor([len(text)], device=self._device))
        self._broadcast(text)

    def _receive_header(self) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.long, device=self._device)
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._broadcast(text)
        return json.loads(bytes(text.cpu().numpy()))

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor.view(torch.uint8), 0).wait()


def buckets(
    weights: NamedTensors, dtype: torch.dtype, device: torch.device, limit: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors as they are sent, in runs of one dtype and at most `limit` bytes (a larger tensor is one alone)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        sent = tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        if bucket and (size + sent.nbytes > limit or sent.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, sent))
        size += sent.nbytes
    if bucket:
        yield bucket
