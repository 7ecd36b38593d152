"""The value function: values of given responses and the value-loss update, one optimizer step a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from valor import algorithms
from valor.algorithms.custom import load_custom
from valor.config import CriticConfig
from valor.data.batch import Batch
from valor.engines.sharding import DTYPES
from valor.errors import UserError
from valor.models.load import load_value_model
from valor.models.value import ValueModel
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext
from valor.workers.model_role import ROW_FIELDS, ModelRole
from valor.workers.reduction import sum_over_ranks

# Value losses whose head does not give the value itself: what turns its output into one, and what config.json says.
_VALUE_OF_OUTPUT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {"bce": (torch.sigmoid, "logit")}
_OUTPUT_KEY = "value_head_output"


class CriticWorker(ModelRole):
    """One rank of the critic. A frozen critic (`critic.freeze`) has no optimizer and is never updated.

    `custom_path`: a file that registers value losses; their head gives the value itself.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: CriticConfig,
        total_steps: int,
        custom_path: str | None,
        seed: int,
    ) -> None:
        load_custom(custom_path)
        self.config = config
        module = load_value_model(config.model, dtype=DTYPES[config.fsdp_config.model_dtype], seed=seed)
        self._value_of = _mark_output(module, config)
        super().__init__(
            context,
            module,
            fsdp=config.fsdp_config,
            optim=None if config.freeze else config.optim,
            checkpoint=config.checkpoint,
            total_steps=total_steps,
        )
        self._limits = {"max_tokens": config.ppo_max_token_len_per_gpu, "max_rows": config.max_rows}

    @dispatch("dp")
    def compute_values(self, batch: Batch, *, with_end: bool = False) -> Batch:
        """`values` [B, T]: the value of the state in which response token t was chosen.

        with_end: also `bootstrap_values` [B], the value of the state after the last response token.
        """
        rows = batch.select(ROW_FIELDS)
        width, lengths = rows["responses"].shape[1], rows["response_lengths"]
        if with_end:  # the state after the last token is the one in which a further token would be chosen
            rows["responses"] = functional.pad(rows["responses"], (0, 1))
            rows["response_lengths"] = lengths + 1
        with self.on_device() as engine:
            values = self._value_of(engine.forward(rows, **self._limits)["values"])
        out = {"values": values[:, :width].masked_fill(torch.arange(width) >= lengths[:, None], 0.0)}
        if with_end:
            out["bootstrap_values"] = values.gather(1, lengths[:, None]).squeeze(1)
        return Batch(out)

    @dispatch("dp")
    def update(self, mini_batch: Batch) -> dict[str, float]:
        """One optimizer step on the rows of a mini-batch; metrics are of the whole mini-batch, over all ranks."""
        with self.on_device(optimizer=True) as engine:
            metrics = engine.forward_backward(mini_batch, self._loss, **self._limits)
            step = engine.optimizer_step(advance_schedule=mini_batch.meta["last_of_step"])
        return sum_over_ranks(metrics) | step

    def _loss(self, outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        loss, metrics = algorithms.value_loss(
            config.value_loss,
            values=outputs["values"],
            old_values=rows["values"],
            returns=rows["returns"],
            response_mask=rows["response_mask"],
            cliprange_value=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
            loss_scale_factor=config.loss_scale_factor,
            num_tokens=rows.meta["num_tokens"],
            num_sequences=rows.meta["num_sequences"],
            **config.value_loss_kwargs,
        )
        return loss, {**metrics, "vf_loss": loss.detach()}


def _mark_output(module: ValueModel, config: CriticConfig) -> Callable[[Tensor], Tensor]:
    """What turns the head's output into the value; exported models say so in their config.json.

    UserError: the checkpoint's head was trained to give something else.
    """
    value_of, kind = _VALUE_OF_OUTPUT.get(config.value_loss, (_identity, "value"))
    found = getattr(module.hf.config, _OUTPUT_KEY, None)
    if found is not None and found != kind:
        raise UserError(
            f"the head of the critic '{config.model.path}' gives the {found} of a value, critic.value_loss="
            f"{config.value_loss} trains one that gives the {kind}: use the value loss that it was trained with"
        )
    if kind != "value":
        setattr(module.hf.config, _OUTPUT_KEY, kind)
    return value_of


def _identity(output: Tensor) -> Tensor:
    return output
