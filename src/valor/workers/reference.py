"""The frozen starting policy: its log-probs are what the KL penalty compares with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from valor.config import ActorRolloutRefConfig
from valor.data.batch import Batch
from valor.engines.fsdp import TrainEngine
from valor.engines.sharding import DTYPES
from valor.models.load import load_policy
from valor.models.lora import adapters_off
from valor.models.policy import Reference
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext
from valor.workers.model_role import ROW_FIELDS, ModelRole


class ReferenceWorker:
    """One rank of the reference policy (forward only, no optimizer).

    Beside an actor that trains adapters it is that actor without them, and holds no weights; else a model of its own.
    It is the model at `model.path`, also where an actor goes on from adapters trained before.
    """

    def __init__(self, context: WorkerContext, *, config: ActorRolloutRefConfig) -> None:
        ref = config.ref
        self._limits = {"max_tokens": ref.log_prob_max_token_len_per_gpu, "max_rows": ref.max_rows}
        self._actor: ModelRole | None = context.roles.get("actor") if config.model.lora_rank else None
        if self._actor is None:
            base = config.model.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})
            load = partial(load_policy, base, dtype=DTYPES[ref.fsdp_config.model_dtype])
            shared = ref.ulysses_sequence_parallel_size
            self._own = ModelRole(context, base, load, fsdp=ref.fsdp_config, optim=None, sequence_parallel=shared)

    @dispatch("dp")
    def compute_log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs` [B, T]."""
        with self._engine() as engine:
            rows = batch.select(ROW_FIELDS)
            out = engine.forward(rows, **self._limits, temperature=batch.meta["temperature"])
        return Batch({"ref_log_probs": out["log_probs"]})

    @contextmanager
    def lent(self) -> Iterator[Reference]:
        """For the actor beside it, whose passes compute the exact KL: distributions of rows, by the reference."""
        if self._actor is not None:
            yield partial(_without_adapters, self._actor.engine.module)
            return
        with self._own.on_device() as engine, engine.lent() as module:
            yield partial(module, as_reference=True)

    @contextmanager
    def _engine(self) -> Iterator[TrainEngine]:
        if self._actor is None:
            with self._own.on_device() as engine:
                yield engine
        else:
            with self._actor.on_device() as engine, adapters_off(engine.module.hf):
                yield engine


def _without_adapters(module: Any, rows: Mapping[str, Tensor]) -> Any:
    """What a policy answers as its own reference, inside a pass of its own: the hooks around it have run already."""
    with adapters_off(module.hf):
        return module.forward(rows, as_reference=True)
