"""A policy's weights on their way to servers, which read them from files, and what the servers tell of them."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.server.connection import Away
from valor.rollout.server.dialects import Dialect, Written
from valor.rollout.transfer import buckets, checksum

_NAME = re.compile("valor-[0-9a-f]{32}")  # of a request, by which it is known in what vLLM calls it
_BEGINNING = 8  # numbers of each tensor that may be compared


class Sent(NamedTuple):
    """Weights that all servers hold which are not left out."""

    name: str
    checksum: int
    sampled: dict[str, int]
    """By the name of a request: how many of its tokens had been sampled before."""
    held: dict[str, list[str | None]]
    """By address: the names of the weights that the server's workers held before."""


@contextmanager
def written(config: RolloutConfig, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Written]:
    """The weights as they are sent to each server, for the block: in a folder that it can read, or in host memory."""
    with TemporaryDirectory(prefix="valor-weights-", dir=config.server.weights_dir) as folder:
        limit = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        total = torch.zeros((), dtype=torch.int64)  # wraps around, as all sums of bits here
        beginnings: dict[str, list[float]] = {}
        kept: list[list[tuple[str, Tensor]]] = []
        sent = buckets(weights, getattr(torch, config.dtype), torch.device("cpu"), limit)
        for number, bucket in enumerate(sent):
            tensors = {key: tensor.contiguous() for key, tensor in bucket}
            total += sum(map(checksum, tensors.values()))
            beginnings |= {key: tensor.flatten()[:_BEGINNING].tolist() for key, tensor in tensors.items()}
            if config.server.weight_updates == "filesystem":
                save_file(tensors, Path(folder) / f"{number:06}.safetensors")
            else:
                kept.append([*tensors.items()])
        nccl = "nccl" in dist.get_backend_config()  # where this process has a GPU
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        yield Written(folder, kept, device, int(total), beginnings)


def send_weights(dialect: Dialect, urls: list[str], files: Written, version: int, leave: Callable[[str], bool]) -> Sent:
    """Replace the weights of all servers but those that `leave` lets go, because they do not answer.

    TrainingStopped unless every worker of the others then holds exactly what was sent.
    """
    name = f"{uuid4().hex}-{version}"  # another run's, or none after a restart, would be noticed

    async def update(url: str) -> list[dict[str, Any]] | None:
        try:
            return await dialect.update(url, files, name, version, partial(leave, url))
        except Away:
            return None

    with dialect.connection.opened() as portal:
        answers = {url: portal.start_task_soon(update, url) for url in urls}
        told = {url: workers for url, answer in answers.items() if (workers := answer.result()) is not None}
    sampled: dict[str, int] = {}
    for url, workers in told.items():
        for held in workers:
            problem = held.get("error")
            if problem is None and int(held.get("checksum", files.checksum)) != files.checksum:
                problem = f"it holds {held['checksum']}, {files.checksum} was sent"
            if problem is not None:
                raise TrainingStopped(f"the rollout server at {url} has not taken weights {version}: {problem}")
        for key, count in workers[0]["sampled"].items():
            if (found := _NAME.search(key)) is not None:
                sampled[found[0]] = max(count, sampled.get(found[0], 0))  # one that was sent twice is there twice
    # Servers of as many parts compute the same digest of the same weights.
    first: dict[str, tuple[str, str]] = {}
    for url, workers in told.items():
        digest = workers[0].get("digest", "")
        other, expected = first.setdefault(digest.partition(" ")[2], (url, digest))
        if digest != expected:
            raise TrainingStopped(
                f"the rollout servers at {other} and {url} were sent the same weights {version} and hold different "
                f"ones: {expected} and {digest}"
            )
    before = {url: [worker["before"] for worker in workers] for url, workers in told.items()}
    return Sent(name, files.checksum, sampled, before)


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
