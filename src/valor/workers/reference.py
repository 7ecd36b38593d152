"""The frozen starting policy: its log-probs are what the KL penalty compares with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from valor.config import ActorRolloutRefConfig
from valor.data.batch import Batch
from valor.engines.sharding import DTYPES
from valor.models.load import load_policy
from valor.models.policy import Reference
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext
from valor.workers.model_role import ROW_FIELDS, ModelRole


class ReferenceWorker(ModelRole):
    """One rank of the reference policy (forward only, no optimizer)."""

    def __init__(self, context: WorkerContext, *, config: ActorRolloutRefConfig) -> None:
        ref = config.ref
        self._limits = {"max_tokens": ref.log_prob_max_token_len_per_gpu, "max_rows": ref.max_rows}
        policy = load_policy(config.model, dtype=DTYPES[ref.fsdp_config.model_dtype])
        super().__init__(context, policy, fsdp=ref.fsdp_config, optim=None)

    @dispatch("dp")
    def compute_log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs` [B, T]."""
        with self.on_device() as engine:
            rows = batch.select(ROW_FIELDS)
            out = engine.forward(rows, **self._limits, temperature=batch.meta["temperature"])
        return Batch({"ref_log_probs": out["log_probs"]})

    @contextmanager
    def lent(self) -> Iterator[Reference]:
        """For the actor beside it, whose passes compute the exact KL: distributions of rows, by the reference."""
        with self.on_device() as engine, engine.lent() as module:
            yield partial(module, as_reference=True)
