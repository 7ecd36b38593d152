"""A policy's weights on their way to vLLM servers, which read them from files, and what the servers tell of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.server.connection import Connection, addresses
from valor.rollout.transfer import buckets, checksum

_NAME = re.compile("valor-[0-9a-f]{32}")


class Sent(NamedTuple):
    """Weights that all servers hold."""

    name: str
    checksum: int
    sampled: dict[str, int]
    """By the name of a request: how many of its tokens had been sampled before."""
    held: dict[str, list[str | None]]
    """By address: the names of the weights that the server's workers held before."""


def new_name() -> str:
    """A name for a request, by which it is known in what vLLM calls it."""
    return f"valor-{uuid4().hex}"


class Written(NamedTuple):
    """Weights in files, and the checksum of all of them."""

    folder: str
    checksum: int


@contextmanager
def written(config: RolloutConfig, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Written]:
    """The weights in a folder that the servers can read, for the block."""
    with TemporaryDirectory(prefix="valor-weights-", dir=config.server.weights_dir) as folder:
        limit = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        total = torch.zeros((), dtype=torch.int64)  # wraps around, as all sums of bits here
        sent = buckets(weights, getattr(torch, config.dtype), torch.device("cpu"), limit)
        for number, bucket in enumerate(sent):
            tensors = {key: tensor.contiguous() for key, tensor in bucket}
            total += sum(map(checksum, tensors.values()))
            save_file(tensors, Path(folder) / f"{number:06}.safetensors")
        yield Written(folder, int(total))


def send_weights(connection: Connection, config: RolloutConfig, files: Written, version: int) -> Sent:
    """Replace the weights of all servers. TrainingStopped unless every worker then holds exactly what was sent."""
    name = f"{uuid4().hex}-{version}"  # another run's, or none after a restart, would be noticed
    urls = addresses(config.server)
    with connection.opened() as portal:
        told = portal.call(_update_all, connection, urls, files.folder, name, version)
    sampled: dict[str, int] = {}
    for url, workers in zip(urls, told, strict=True):
        for held in workers:
            problem = held.get("error")
            if problem is None and int(held["checksum"]) != files.checksum:
                problem = f"it holds {held['checksum']}, {files.checksum} was sent"
            if problem is not None:
                raise TrainingStopped(f"the rollout server at {url} has not taken weights {version}: {problem}")
        for key, count in workers[0]["sampled"].items():
            if (found := _NAME.search(key)) is not None:
                sampled[found[0]] = max(count, sampled.get(found[0], 0))  # one that was sent twice is there twice
    before = [[worker["before"] for worker in workers] for workers in told]
    return Sent(name, files.checksum, sampled, dict(zip(urls, before, strict=True)))


async def _update_all(
    connection: Connection, urls: list[str], folder: str, name: str, version: int
) -> list[list[dict[str, Any]]]:
    return await asyncio.gather(*(connection.rpc(url, "valor_update", folder, name, version) for url in urls))


async def held_by(connection: Connection, url: str) -> list[str | None]:
    """The names of the weights in the workers of a server."""
    return [one["weights"] for one in await connection.rpc(url, "valor_describe")]


def compare(url: str, held: Iterable[str | None], name: str | None) -> None:
    """WorkersReplaced when a server's workers `held` no weights that were sent; TrainingStopped when not `name`'s."""
    for one in held:
        if one is None:
            raise WorkersReplaced(f"the rollout server at {url} was started anew: it is sent the weights again")
        if name is not None and one != name:
            raise TrainingStopped(
                f"the rollout server at {url} no longer holds the weights that this run sent: another run uses it; run "
                "the same command again, when it is free, to go on from the last checkpoint"
            )
