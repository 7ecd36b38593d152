"""The value function: values of given responses and the value-loss update, one optimizer step a call."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.algorithms import load_custom
from valor.config import CriticConfig, PPOConfig
from valor.data.batch import Batch
from valor.engines.base import LossFn
from valor.errors import UserError
from valor.models.load import load_value_model
from valor.models.rows import ROW_FIELDS, model_rows
from valor.models.value import ValueHead
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole, longer_rows


class CriticWorker(ModelRole):
    """One rank of the critic. A frozen critic (`critic.freeze`) has no optimizer and is never updated.

    `member`: its number in an ensemble, from 0. The head of a value loss of the user's own gives the value itself.
    """

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts, member: int = 0) -> None:
        load_custom(config.algorithm.custom_path)
        critic = self.config = config.critic
        head = None if critic.freeze else value_head(critic)  # a frozen critic keeps its saved head
        seed = config.trainer.seed + member
        load = partial(
            load_value_model,
            critic.model,
            head=head,
            seed=seed,
            says={
                **({"value_target": critic.learns} if critic.learns == "residual" else {}),
                **({"value_prompt_template": critic.prompt_template} if critic.prompt_template is not None else {}),
            },
            frozen_vision=critic.freeze_vision_tower,
        )
        steps, trains = facts.learning_steps, not critic.freeze
        super().__init__(context, critic, critic.model, load, total_steps=steps, trainable=trains)
        self._limits = {"max_tokens": critic.ppo_max_token_len_per_gpu, "max_rows": critic.max_rows}

    @Dispatch("dp", reads=ROW_FIELDS, stays=("values",))
    def compute_values(self, batch: Batch, *, with_end: bool = False) -> Batch:
        """`values` [B, T]: the value of the state in which response token t was chosen.

        with_end: also `bootstrap_values` [B], the value of the state after the last response token.
        """
        rows = model_rows(batch)
        with self.on_device() as engine:
            longer = longer_rows(rows) if with_end else rows
            outputs = engine.forward(longer, **self._limits)
        return Batch(state_values(outputs, rows, with_end=with_end))

    @Dispatch("dp")
    def update(self, mini_batch: Batch) -> dict[str, float]:
        """One optimizer step on the rows of a mini-batch; metrics are of the whole mini-batch, over all ranks."""
        return self._update(mini_batch, self._loss)

    @Dispatch("dp", stays=("values",))
    def update_with_values(self, mini_batch: Batch, options: dict[str, Any]) -> Batch:
        """`update` whose targets come from its own forward pass: `values` [B, T] as in `compute_values`, and in
        `meta["metrics"]` the metrics of `update`. options: of GAE, which makes a row's returns of its
        `token_level_rewards` and values."""
        values = torch.zeros(mini_batch["responses"].shape, device=self.engine.device)

        def loss(outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            present = {"values": outputs["values"].detach(), "response_mask": rows["response_mask"]}
            values[rows["row"]] = present["values"]
            _, returns = algorithms.compute_advantages("gae", rewards=rows["token_level_rewards"], **present, **options)
            return self._loss(outputs, rows.union(Batch({"values": present["values"], "returns": returns})))

        metrics = self._update(mini_batch.union(Batch({"row": torch.arange(len(mini_batch))})), loss)
        return Batch({"values": values.cpu()}, meta={"metrics": metrics})

    def _update(self, mini_batch: Batch, loss: LossFn) -> dict[str, float]:
        last = mini_batch.meta["last_of_step"]
        return self.optimize(mini_batch, loss, advance_schedule=last, **self._limits, raw=True)

    def _loss(self, outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        loss, metrics = algorithms.value_loss(
            config.value_loss,
            values=outputs["head_outputs"],
            old_values=rows["values"],
            returns=rows["returns"],
            response_mask=rows["response_mask"],
            cliprange_value=config.cliprange_at(rows.meta["global_step"]),
            loss_agg_mode=config.loss_agg_mode,
            loss_scale_factor=config.loss_scale_factor,
            num_tokens=rows.meta["num_tokens"],
            num_sequences=rows.meta["num_sequences"],
            sequence_lengths=rows.tensors.get("sequence_lengths"),
            **config.value_loss_kwargs,
        )
        return loss, {**metrics, "vf_loss": loss.detach()}


def state_values(outputs: dict[str, Tensor], rows: Batch, *, with_end: bool) -> dict[str, Tensor]:
    """`values` and other outputs of the states before the response tokens of `rows`; with_end: `outputs` are those of
    `longer_rows`, and `bootstrap_values` [B] the values after the last tokens."""
    width, lengths = rows["responses"].shape[1], rows["response_lengths"]
    out = {name: x[:, :width] for name, x in outputs.items()}
    out["values"] = out["values"].masked_fill(torch.arange(width) >= lengths[:, None], 0.0)
    if with_end:
        out["bootstrap_values"] = outputs["values"].gather(1, lengths[:, None]).squeeze(1)
    return out


def value_head(config: CriticConfig) -> ValueHead:
    """The head that `critic.value_loss` trains. UserError: its number of outputs is not valid."""
    options = config.value_loss_kwargs
    if config.value_loss == "bce":
        return ValueHead("logit")
    if config.value_loss == "hl_gauss":
        size, low, high = options.get("num_bins", 51), options.get("value_min", 0.0), options.get("value_max", 1.0)
        if not (isinstance(size, int) and size > 1 and isinstance(low, int | float) and isinstance(high, int | float)):
            raise UserError(
                "critic.value_loss=hl_gauss: in critic.value_loss_kwargs num_bins is a whole number of at least 2, "
                "value_min and value_max are numbers"
            )
        return ValueHead("bins", size, low, high)
    return ValueHead()
