"""What every role that owns a model shares: its engine, turns on the device, checkpoints and export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from valor.config import CheckpointConfig, FSDPConfig, OptimConfig
from valor.config.model import BackboneConfig
from valor.engines.fsdp import TrainEngine
from valor.engines.loading import built_once
from valor.models.load import import_model_code
from valor.models.lora import ADAPTER_DIR, has_adapters, write_adapter_config
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext

ROW_FIELDS = ("prompts", "prompt_lengths", "responses", "response_lengths")
MODEL_CONFIG_DIR = "huggingface"  # in a role's checkpoint folder: its config.json, with `hf_model` the whole model


class ModelRole:
    """One rank of a role. Roles that share a device take turns: `param_offload` and `optimizer_offload` name what
    stays in CPU memory while another role works.

    `load` reads the module of `model`, on one rank.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: BackboneConfig,
        load: Callable[[], nn.Module],
        *,
        fsdp: FSDPConfig,
        optim: OptimConfig | None,
        checkpoint: CheckpointConfig | None = None,
        total_steps: int = 0,
        sequence_parallel: int = 1,
    ) -> None:
        self._rank = context.rank
        self._fsdp = fsdp
        self._checkpoint = checkpoint or CheckpointConfig()
        self.engine = TrainEngine(
            built_once(load, prepare=partial(import_model_code, model)),
            fsdp=fsdp,
            optim=optim,
            device=context.device,
            total_steps=total_steps,
            sequence_parallel=sequence_parallel,
        )
        self.engine.offload(parameters=fsdp.param_offload, optimizer=fsdp.optimizer_offload)

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[TrainEngine]:
        """The engine with its weights (and optimizer state) on the device for the block."""
        moved = {"parameters": self._fsdp.param_offload, "optimizer": self._fsdp.optimizer_offload and optimizer}
        self.engine.onload(**moved)
        try:
            yield self.engine
        finally:
            self.engine.offload(**moved)

    @dispatch("all")
    def save(self, directory: Path) -> None:
        """Weights, counters and (if trained) optimizer of all ranks, sharded, into `directory`; the config beside.

        Of a model with adapters these and the head alone are its weights.
        """
        with self.on_device(optimizer=True) as engine:
            engine.save(directory)
            if "hf_model" in self._checkpoint.save_contents:
                engine.export_hf(directory / MODEL_CONFIG_DIR)
        if self._rank == 0:
            hf: Any = self.engine.module.hf
            hf.config.save_pretrained(directory / MODEL_CONFIG_DIR)
            if has_adapters(hf):
                write_adapter_config(hf, directory / MODEL_CONFIG_DIR / ADAPTER_DIR)

    @dispatch("all")
    def load(self, directory: Path) -> None:
        """What `save` wrote, at any world size."""
        with self.on_device(optimizer=True) as engine:
            engine.load(directory)

    @dispatch("all")
    def export(self, directory: Path) -> None:
        """A plain Hugging Face model directory."""
        with self.on_device() as engine:
            engine.export_hf(directory)
