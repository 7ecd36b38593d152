"""What every role that owns a model shares: its engine, turns on the device, checkpoints and export."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from valor.config.engine import BackboneConfig, CheckpointConfig
from valor.data.batch import Batch
from valor.engines.base import LossFn, TrainingEngine
from valor.engines.checkpoint import MODEL_CONFIG_DIR
from valor.engines.registry import DEFAULT_STRATEGY, TRAINING_ENGINES
from valor.tracking.metrics import reduce_metrics
from valor.tracking.rundir import disk_errors
from valor.workers.dispatch import Dispatch
from valor.workers.host import WorkerContext


def longer_rows(rows: Batch) -> Batch:
    """Rows with one response token more, whose state is the one after the last token of each."""
    longer = functional.pad(rows["responses"], (0, 1))
    return rows.union(Batch({"responses": longer, "response_lengths": rows["response_lengths"] + 1}))


class ModelRole:
    """One rank of a role, whose engine is built from the role's configuration, `section`, and chosen by its `strategy`.

    `load(dtype=…)` reads the module of `model`. Roles that share a device take turns: `on_device` is one.
    """

    engine: TrainingEngine

    def __init__(
        self,
        context: WorkerContext,
        section: Any,
        model: BackboneConfig,
        load: Callable[..., nn.Module],
        *,
        total_steps: int = 0,
        trainable: bool = True,
    ) -> None:
        self._section, self._context = section, context
        self._turns = 0  # that are under way, one inside the other
        self._with_optimizer = False  # whether its state is on the device
        build = TRAINING_ENGINES[getattr(section, "strategy", DEFAULT_STRATEGY)]
        self.engine = build(section, model, load, device=context.device, total_steps=total_steps, trainable=trainable)

    @property
    def data_parallel_rank(self) -> int:
        """Number of the share of a batch that this rank computes."""
        return self.engine.data_parallel_rank

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[TrainingEngine]:
        """The engine with its weights (and optimizer state) on the device for the block.

        They stay there until another role has a turn: the mini-batches of an update move nothing. Optimizer state
        leaves before a turn without it, which may need the room.
        """
        self._context.make_room(besides=self if optimizer or not self._with_optimizer else None)
        self.engine.onload(optimizer=optimizer)
        self._with_optimizer |= optimizer
        if self not in self._context.resident:
            self._context.resident.append(self)
        self._turns += 1
        try:
            yield self.engine
        finally:
            self._turns -= 1

    def leave_device(self) -> None:
        """Offload what the configuration says; nothing during a turn."""
        if not self._turns:
            self.engine.offload()
            self._with_optimizer = False
            self._context.resident.remove(self)

    def optimize(
        self, batch: Batch, loss: LossFn, *, advance_schedule: bool = True, **options: Any
    ) -> dict[str, float]:
        """One optimizer step on this rank's rows of a batch; metrics are of the whole batch, over all ranks."""
        with self.on_device(optimizer=True) as engine:
            metrics = engine.forward_backward(batch, loss, **options)
            return self.apply_gradients(batch, metrics, advance_schedule=advance_schedule)

    def apply_gradients(
        self, batch: Batch, metrics: Mapping[str, float], *, advance_schedule: bool = True
    ) -> dict[str, float]:
        """The optimizer's step after the passes over a batch; its metrics and theirs, over all ranks.

        Without a token to learn from there are only its own: zeros of such a loss are no measurements.
        """
        learns = batch.meta.get("learns", True)  # engines that know no such option need none until then
        step = self.engine.optimizer_step(advance_schedule=advance_schedule, **({} if learns else {"learns": False}))
        return self.sum_over_ranks(metrics) | step if learns else step

    def sum_over_ranks(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of this rank's rows as those of the whole batch, equal on all ranks (collective)."""
        if dist.get_world_size() == 1:
            return dict(metrics)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self.data_parallel_rank, dict(metrics)))
        shares: dict[int, dict[str, float]] = {}
        for share, of_rank in parts:
            shares.setdefault(share, of_rank)
        return reduce_metrics(shares.values())

    @Dispatch("all")
    def save(self, directory: Path) -> None:
        """Weights, counters and (if trained) optimizer of all ranks, sharded, into `directory`; the config beside."""
        with disk_errors(directory), self.on_device(optimizer=True) as engine:
            engine.save(directory)
            if "hf_model" in getattr(self._section, "checkpoint", CheckpointConfig()).save_contents:
                engine.export(directory / MODEL_CONFIG_DIR)

    @Dispatch("all")
    def load(self, directory: Path) -> None:
        """What `save` wrote, at any world size."""
        with disk_errors(directory), self.on_device(optimizer=True) as engine:
            engine.load(directory)

    @Dispatch("all", light=True)
    def checkpoint_bytes(self) -> int:
        """How large what `save` writes will be."""
        return self.engine.checkpoint_bytes

    @Dispatch("all")
    def export(self, directory: Path) -> None:
        """A plain Hugging Face model directory."""
        with disk_errors(directory), self.on_device() as engine:
            engine.export(directory)
