"""Learned reward models: one score a text, frozen; and one in training on pairs of texts."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from valor.algorithms import bradley_terry_loss
from valor.config import PPOConfig, RMConfig
from valor.data.batch import Batch
from valor.models.load import load_sequence_classifier
from valor.models.reward import PreferenceModel, backbone, load_reward_model
from valor.models.rows import ROW_FIELDS
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole, longer_rows


class RewardModelWorker(ModelRole):
    """One rank of the reward model."""

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts) -> None:
        model = config.reward.reward_model
        self._limits = {"max_tokens": model.max_token_len_per_gpu, "max_rows": model.micro_batch_size_per_gpu}
        self._by_token = model.gives != "outcome"
        load = partial(load_reward_model, model, separator_id=facts.separator_id)
        super().__init__(context, model, backbone(model), load, trainable=False)

    @Dispatch("dp")
    def score(self, rows: Batch) -> Batch:
        """`scores` [B] of texts in the rows that data.reward_texts makes of them; of a critic the value of the state in
        which the last response token was chosen, the last that it was trained to give.

        By tokens: `values` [B, T + 1], of the state before each response token and of the one after the last.
        """
        rows = rows.select(ROW_FIELDS)
        with self.on_device() as engine:
            outputs = engine.forward(longer_rows(rows) if self._by_token else rows, **self._limits)
        if not self._by_token and "values" in outputs:
            outputs = {"scores": outputs["values"].gather(1, rows["response_lengths"][:, None] - 1).squeeze(1)}
        return Batch(outputs)


class PreferenceWorker(ModelRole):
    """One rank of the reward model under training. `pad_token_id`: that of the tokenizer."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: RMConfig,
        total_steps: int,
        separator_id: int | None,
        pad_token_id: int | None,
    ) -> None:
        data = config.data
        self._center_coef = config.loss.center_coef
        self._limits = {"max_tokens": data.max_token_len_per_gpu, "max_rows": data.micro_batch_size_per_gpu}

        def load(dtype: torch.dtype) -> PreferenceModel:
            hf = load_sequence_classifier(config.model, dtype=dtype, new_head_seed=config.trainer.seed)
            text_config = hf.config.get_text_config()
            by_padding = isinstance(getattr(hf, "score", None), nn.Linear)  # it looks for the last token before padding
            if pad_token_id is not None and (by_padding or text_config.pad_token_id is None):
                text_config.pad_token_id = pad_token_id
            layout = {"packed": config.model.use_remove_padding, "shared": config.model.share_prefixes}
            return PreferenceModel(hf, separator_id=separator_id, **layout)

        super().__init__(context, config, config.model, load, total_steps=total_steps)

    @Dispatch("dp")
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; `loss`, `accuracy` and `margin` (chosen - rejected) are means over all ranks' pairs."""
        return self.optimize(batch, self._loss, **self._limits)

    @Dispatch("dp")
    def score(self, batch: Batch) -> Batch:
        """`chosen` and `rejected` [B]."""
        with self.on_device() as engine:
            return Batch(engine.forward(batch.select(ROW_FIELDS), **self._limits))

    def _loss(self, outputs: Mapping[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected, count = outputs["chosen"], outputs["rejected"], rows.meta["num_pairs"]
        losses = bradley_terry_loss(chosen, rejected, margin=rows["margin"], center_coef=self._center_coef)
        loss, won = losses.sum() / count, (chosen - rejected).detach()
        metrics = {"loss": loss.detach(), "accuracy": (won.sign() + 1).sum() / (2 * count), "margin": won.sum() / count}
        return loss, metrics
