"""Ways in which SGLang takes weights that are not in files: a broadcast to its processes, or memory of this machine.

Shapes: docs/servers.md.
"""

import asyncio
import base64
import io
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor, multiprocessing
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.reductions import reduce_tensor

from valor.errors import TrainingStopped
from valor.rollout.transfer import MEETING

Bucket = list[tuple[str, Tensor]]
Post = Callable[..., Awaitable[Any]]
"""`post(path, body)`, or `post(path)` to get: what a server answers."""

_AT_ONCE = 0.05  # seconds
_SETTLES = 5.0  # seconds in which it is known why a transfer broke off
_DEVICE = 6  # which argument of torch's rebuild_cuda_tensor says where the memory is


async def broadcast(post: Post, url: str, sent: list[Bucket], name: str, device: torch.device, seconds: float) -> Any:
    """The server's last answer to `sent`, broadcast bucket by bucket over a process group that is there meanwhile."""
    told = None
    async with _group(post, url, device, seconds) as (title, group):
        for number, bucket in enumerate(sent):
            asked = {
                "names": [key for key, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": title,
                **_order(name, last=number == len(sent) - 1),
            }
            told = await _while(post("update_weights_from_distributed", asked), partial(_send, group, bucket, device))
    return told


async def share(post: Post, sent: list[Bucket], name: str, device: torch.device) -> Any:
    """The server's last answer to `sent`, whose memory its processes open bucket by bucket."""
    told, parts = None, await _parts(post)
    for number, bucket in enumerate(sent):
        there = [(key, tensor.to(device)) for key, tensor in bucket]  # until it is answered
        handles = [_handles(there) for _ in range(parts)]
        asked = {"serialized_named_tensors": handles, **_order(name, last=number == len(sent) - 1)}
        told = await post("update_weights_from_tensor", asked)
    return told


def _order(name: str, *, last: bool) -> dict[str, Any]:
    """Half an update has no name."""
    return {"flush_cache": last, "abort_all_requests": False, **({"weight_version": name} if last else {})}


async def _parts(post: Post) -> int:
    """Of how many processes the server consists, each of which is given all weights."""
    told = await post("server_info")
    if told.get("dp_size", 1) * told.get("pp_size", 1) > 1:
        raise TrainingStopped(
            "a rollout server has replicas or pipeline stages, and weights are sent to one whole model: split it by "
            "--tp-size alone, or set actor_rollout_ref.rollout.server.weight_updates=filesystem"
        )
    return told["tp_size"]


@asynccontextmanager
async def _group(post: Post, url: str, device: torch.device, seconds: float) -> AsyncIterator[tuple[str, Any]]:
    """A process group of this process, rank 0, and the server's; its name. As SGLang makes its own part of it."""
    parts = urlsplit(url)
    with socket.socket(type=socket.SOCK_DGRAM) as out:  # sends nothing: tells by which address that host knows this one
        out.connect((parts.hostname, parts.port or 80))
        address = out.getsockname()[0]
    size, title, backend = await _parts(post) + 1, f"valor-{uuid4().hex}", "nccl" if device.type == "cuda" else "gloo"
    store = TCPStore(address, 0, size, is_master=True, timeout=MEETING, wait_for_workers=False)
    where = {"master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": size}
    found: list[Any] = []

    def join() -> None:
        inside, timeout = PrefixStore(title, store), timedelta(seconds=seconds)
        make: Any = distributed_c10d._new_process_group_helper  # the only one that takes a store
        group, _ = make(size, 0, [], backend, inside, group_name=title, timeout=timeout)
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        found.append(group)

    try:
        await _while(post("init_weights_update_group", {**where, "group_name": title, "backend": backend}), join)
        if not found:
            raise TrainingStopped(f"the rollout server at {url} does not join the process group of its weights")
        yield title, found[0]
    finally:
        with suppress(Exception):  # a server that is gone has left the group
            await post("destroy_weights_update_group", {"group_name": title}, leave=lambda: True)
        for group in found:
            distributed_c10d.destroy_process_group(group)


async def _while(answer: Awaitable[Any], work: Callable[[], None]) -> Any:
    """A server's answer to what needs `work` here at the same time; one that comes at once is a refusal."""
    told = asyncio.ensure_future(answer)
    await asyncio.wait({told}, timeout=_AT_ONCE)  # nothing would end the work then
    if told.done():
        return told.result()
    done = asyncio.get_running_loop().run_in_executor(None, work)
    await asyncio.wait({told, done}, return_when=asyncio.FIRST_EXCEPTION)
    if not done.done() or (error := done.exception()) is None:
        return told.result()
    await asyncio.wait({told}, timeout=_SETTLES)  # a server that has gone may be left out
    if told.done():
        told.result()
    told.cancel()
    raise TrainingStopped(
        f"weights do not reach a rollout server ({error}): the same command goes on from the last checkpoint"
    ) from error


def _send(group: Any, bucket: Bucket, device: torch.device) -> None:
    with torch.cuda.device(device if device.type == "cuda" else -1):  # this thread's; -1: none
        for work in [group.broadcast(tensor.to(device), 0) for _, tensor in bucket]:
            work.wait()


def _handles(bucket: Bucket) -> str:
    """What opens these tensors in another process of this machine, as SGLang's MultiprocessingSerializer writes it."""
    before, out = multiprocessing.get_sharing_strategy(), io.BytesIO()
    multiprocessing.set_sharing_strategy("file_system")  # of the host's memory: for processes that are no relatives
    try:
        pickler = ForkingPickler(out, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table[Tensor] = _reduced  # type: ignore[index]
        pickler.dump(bucket)
    finally:
        multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(out.getvalue()).decode()


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    """A GPU is named by its UUID: processes number them as they please."""
    rebuild, given = reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        given = (*given[:_DEVICE], uuid, *given[_DEVICE + 1 :])
    return rebuild, given
