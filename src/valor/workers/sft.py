"""The policy under supervised training: it learns the response tokens that a mask selects."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from valor import algorithms
from valor.config import SFTConfig
from valor.data.batch import Batch
from valor.models.load import load_policy
from valor.workers.dispatch import Dispatch
from valor.workers.host import WorkerContext
from valor.workers.model_role import ModelRole


class SFTWorker(ModelRole):
    """One rank of the policy."""

    def __init__(self, context: WorkerContext, *, config: SFTConfig, total_steps: int) -> None:
        data = config.data
        self._limits = {"max_tokens": data.max_token_len_per_gpu, "max_rows": data.micro_batch_size_per_gpu}
        load = partial(load_policy, config.model, seed=config.trainer.seed)
        super().__init__(context, config, config.model, load, total_steps=total_steps)

    @Dispatch("dp")
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; `loss` is the mean over the tokens that count, over all ranks."""
        return self.optimize(batch, token_loss, **self._limits)

    @Dispatch("dp")
    def evaluate(self, batch: Batch) -> dict[str, float]:
        """`loss` and `token_accuracy` (greedy, given the demonstration so far), means over the tokens that count."""
        with self.on_device() as engine:
            out = engine.forward(batch, **self._limits, with_hits=True)
        mask, count = batch["response_mask"], batch.meta["num_tokens"]
        loss, hits = -(out["log_probs"] * mask).sum() / count, (out["hits"] * mask).sum() / count
        return self.sum_over_ranks({"loss": float(loss), "token_accuracy": float(hits)})


def token_loss(outputs: Mapping[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """These rows' share of -mean log-prob over the tokens that count in the whole batch."""
    loss = algorithms.aggregate_loss(
        -outputs["log_probs"], rows["response_mask"], mode="token-mean", denominator=rows.meta["num_tokens"]
    )
    return loss, {"loss": loss.detach()}
