"""A policy's weights in files that servers read, and the names by which they are known there."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from valor.config import RolloutConfig
from valor.errors import TrainingStopped, WorkersReplaced
from valor.rollout.transfer import NamedTensors, buckets, checksum

_NUM_FIRST = 8  # values at the start of each tensor that a read-back may compare


class WeightFiles(NamedTuple):
    folder: str
    checksum: int
    first_values: dict[str, list[float]]  # of each tensor, as float32


@contextmanager
def written(config: RolloutConfig, weights: NamedTensors) -> Iterator[WeightFiles]:
    """The weights in the precision of generation, for the block."""
    with TemporaryDirectory(prefix="valor-weights-", dir=config.server.weights_dir) as folder:
        limit = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        total = torch.zeros((), dtype=torch.int64)  # wraps around, as all checksums here
        first_values: dict[str, list[float]] = {}
        rounded = buckets(weights, getattr(torch, config.dtype), torch.device("cpu"), limit)
        for number, bucket in enumerate(rounded):
            tensors = {name: tensor.contiguous() for name, tensor in bucket}
            total += sum(map(checksum, tensors.values()))
            first_values |= {name: tensor.flatten()[:_NUM_FIRST].tolist() for name, tensor in tensors.items()}
            save_file(tensors, Path(folder) / f"{number:06}.safetensors")
        yield WeightFiles(folder, int(total), first_values)


def compare_names(url: str, names: Iterable[str | None], expected: str | None) -> None:
    """WorkersReplaced when a worker has no weights of a run (None); TrainingStopped when others than `expected`."""
    for name in names:
        if name is None:
            raise WorkersReplaced(f"the rollout server at {url} was started anew: it is sent the weights again")
        if expected is not None and name != expected:
            raise TrainingStopped(
                f"the rollout server at {url} no longer holds the weights that this run sent: another run uses it; run "
                "the same command again, when it is free, to go on from the last checkpoint"
            )
