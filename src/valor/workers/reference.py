"""The frozen starting policy: its log-probs are what the KL penalty compares with."""

from __future__ import annotations

from valor.config import ActorRolloutRefConfig
from valor.data.batch import Batch
from valor.engines.fsdp import TrainEngine
from valor.engines.sharding import parse_dtype
from valor.models.load import load_policy
from valor.workers.actor import ROW_FIELDS
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext


class ReferenceWorker:
    """One rank of the reference policy (forward only, no optimizer)."""

    def __init__(self, context: WorkerContext, *, config: ActorRolloutRefConfig) -> None:
        self._limits = {"max_tokens": config.ref.log_prob_max_token_len_per_gpu, "max_rows": config.ref.max_rows}
        policy = load_policy(config.model, dtype=parse_dtype(config.ref.fsdp_config.model_dtype))
        self.engine = TrainEngine(policy, fsdp=config.ref.fsdp_config, optim=None, device=context.device)

    @dispatch("dp")
    def compute_log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs` [B, T]."""
        out = self.engine.forward(batch.select(ROW_FIELDS), **self._limits, temperature=batch.meta["temperature"])
        return Batch({"ref_log_probs": out["log_probs"]})
