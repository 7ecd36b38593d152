"""The learned reward model: one score a text. Frozen, and off the device while others work (`param_offload`)."""

from __future__ import annotations

from functools import partial

from valor.config.reward import RewardModelConfig
from valor.data.batch import Batch
from valor.engines.sharding import DTYPES
from valor.models.reward import backbone, load_reward_model
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext
from valor.workers.model_role import ROW_FIELDS, ModelRole


class RewardModelWorker(ModelRole):
    """One rank of the reward model. `separator_id` as in models.reward.RewardModel."""

    def __init__(self, context: WorkerContext, *, config: RewardModelConfig, separator_id: int | None) -> None:
        fsdp = config.fsdp_config
        self._limits = {"max_tokens": config.max_token_len_per_gpu, "max_rows": config.micro_batch_size_per_gpu}
        load = partial(load_reward_model, config, separator_id=separator_id, dtype=DTYPES[fsdp.model_dtype])
        super().__init__(context, backbone(config), load, fsdp=fsdp, optim=None)

    @dispatch("dp")
    def score(self, rows: Batch) -> Batch:
        """`scores` [B] of texts in the rows that data.reward_texts makes of them."""
        with self.on_device() as engine:
            return Batch({"scores": engine.forward(rows.select(ROW_FIELDS), **self._limits)["scores"]})
