"""The value function: values of given responses and the value-loss update, one optimizer step a call."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from valor import algorithms
from valor.config import CriticConfig
from valor.data.batch import Batch
from valor.engines.fsdp import TrainEngine
from valor.engines.sharding import parse_dtype
from valor.models.load import load_value_model
from valor.workers.actor import ROW_FIELDS
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext
from valor.workers.reduction import sum_over_ranks


class CriticWorker:
    """One rank of the critic. A frozen critic (`critic.freeze`) has no optimizer and is never updated."""

    def __init__(self, context: WorkerContext, *, config: CriticConfig, total_steps: int, seed: int) -> None:
        self.config = config
        self._rank = context.rank
        self.engine = TrainEngine(
            load_value_model(config.model, dtype=parse_dtype(config.fsdp_config.model_dtype), seed=seed),
            fsdp=config.fsdp_config,
            optim=None if config.freeze else config.optim,
            device=context.device,
            total_steps=total_steps,
        )

    @dispatch("dp")
    def compute_values(self, batch: Batch) -> Batch:
        """`values` [B, T]: the value of the state in which response token t was chosen."""
        out = self.engine.forward(
            batch.select(ROW_FIELDS), max_tokens=self.config.ppo_max_token_len_per_gpu, max_rows=self.config.max_rows
        )
        return Batch({"values": out["values"]})

    @dispatch("dp")
    def update(self, mini_batch: Batch) -> dict[str, float]:
        """One optimizer step on the rows of a mini-batch; metrics are of the whole mini-batch, over all ranks."""
        metrics = self.engine.forward_backward(
            mini_batch,
            self._loss,
            max_tokens=self.config.ppo_max_token_len_per_gpu,
            max_rows=self.config.max_rows,
        )
        return sum_over_ranks(metrics) | self.engine.optimizer_step(advance_schedule=mini_batch.meta["last_of_step"])

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

    @dispatch("all")
    def save(self, directory: Path) -> None:
        """Weights, the config, and unless frozen optimizer and schedule, sharded, into `directory`."""
        self.engine.save(directory)
        if self._rank == 0:
            self.engine.module.hf.config.save_pretrained(directory / "huggingface")

    @dispatch("all")
    def load(self, directory: Path) -> None:
        """What `save` wrote, at any world size."""
        self.engine.load(directory)

    @dispatch("all")
    def export(self, directory: Path) -> None:
        """A plain Hugging Face `*ForTokenClassification` directory with one label."""
        self.engine.export_hf(directory)
