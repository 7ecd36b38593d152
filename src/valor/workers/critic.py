"""The value function: values of given responses and the value-loss update, one optimizer step a call."""

from __future__ import annotations

from torch import Tensor

from valor import algorithms
from valor.config import CriticConfig
from valor.data.batch import Batch
from valor.engines.sharding import DTYPES
from valor.models.load import load_value_model
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext
from valor.workers.model_role import ROW_FIELDS, ModelRole
from valor.workers.reduction import sum_over_ranks


class CriticWorker(ModelRole):
    """One rank of the critic. A frozen critic (`critic.freeze`) has no optimizer and is never updated."""

    def __init__(self, context: WorkerContext, *, config: CriticConfig, total_steps: int, seed: int) -> None:
        self.config = config
        super().__init__(
            context,
            load_value_model(config.model, dtype=DTYPES[config.fsdp_config.model_dtype], seed=seed),
            fsdp=config.fsdp_config,
            optim=None if config.freeze else config.optim,
            checkpoint=config.checkpoint,
            total_steps=total_steps,
        )
        self._limits = {"max_tokens": config.ppo_max_token_len_per_gpu, "max_rows": config.max_rows}

    @dispatch("dp")
    def compute_values(self, batch: Batch) -> Batch:
        """`values` [B, T]: the value of the state in which response token t was chosen."""
        with self.on_device() as engine:
            out = engine.forward(batch.select(ROW_FIELDS), **self._limits)
        return Batch({"values": out["values"]})

    @dispatch("dp")
    def update(self, mini_batch: Batch) -> dict[str, float]:
        """One optimizer step on the rows of a mini-batch; metrics are of the whole mini-batch, over all ranks."""
        with self.on_device(optimizer=True) as engine:
            metrics = engine.forward_backward(mini_batch, self._loss, **self._limits)
            step = engine.optimizer_step(advance_schedule=mini_batch.meta["last_of_step"])
        return sum_over_ranks(metrics) | step

    def _loss(self, outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = algorithms.value_loss(
            values=outputs["values"],
            old_values=rows["values"],
            returns=rows["returns"],
            response_mask=rows["response_mask"],
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode,
            loss_scale_factor=self.config.loss_scale_factor,
            num_tokens=rows.meta["num_tokens"],
            num_sequences=rows.meta["num_sequences"],
        )
        return loss, {**metrics, "vf_loss": loss.detach()}
