"""The value function: a Hugging Face token-classification model. Its labels give a value, its logit, or bins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from valor.algorithms import hl_gauss_value, quantiles_of, tail_mean
from valor.algorithms.value_losses import bin_centres
from valor.errors import UserError
from valor.models.rows import RowReader

# The names that transformers gives the head of its *ForTokenClassification classes.
HEAD_NAMES = ("score", "classifier")
ALL_LEVELS = (0.0, 1.0)


@dataclass(frozen=True)
class ValueHead:
    """How a value is read from the head's `size` outputs z; an exported critic's config.json says it.

    value: z itself. logit: the sigmoid of z. bins: the mean, under softmax z, of the centres of equal bins of
    [value_min, value_max]. quantiles: the mean of z, quantiles at the levels (i + ½) / size. label: the probability of
    one of `size` labels (a process reward model).
    """

    output: Literal["value", "logit", "bins", "quantiles", "label"] = "value"
    size: int = 1
    value_min: float = 0.0
    value_max: float = 1.0
    label: int = 0

    @staticmethod
    def of(config: Any) -> ValueHead | None:
        """What a Hugging Face config says; None if it says nothing."""
        output = getattr(config, "value_head_output", None)
        if output is None:
            return None
        if output == "label":
            return ValueHead(output, config.num_labels, label=config.value_label)
        bounds = (config.value_min, config.value_max) if output == "bins" else ()
        return ValueHead(output, config.num_labels, *bounds)

    def write(self, config: Any) -> None:
        """Make a Hugging Face config say it."""
        config.num_labels = self.size
        config.value_head_output = self.output
        if self.output == "label":
            config.value_label = self.label
        if self.output == "bins":
            config.value_min, config.value_max = self.value_min, self.value_max

    def values(self, z: Tensor) -> Tensor:
        """Values [N] of outputs [N, size]."""
        if self.output == "bins":
            return hl_gauss_value(z, value_min=self.value_min, value_max=self.value_max)
        if self.output == "quantiles":
            return z.mean(-1)
        if self.output == "label":
            return z.softmax(-1)[..., self.label]
        return z.squeeze(-1).sigmoid() if self.output == "logit" else z.squeeze(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Rising atoms [K] or [N, K], and the weight [N, K] of each."""
        if self.output == "bins":
            return bin_centres(z, self.value_min, self.value_max), z.softmax(-1)
        return z.sort(-1).values, torch.full_like(z, 1 / self.size)

    @property
    def is_distribution(self) -> bool:
        """Whether it says more than a mean."""
        return self.output in ("bins", "quantiles")

    def __str__(self) -> str:
        if self.output == "bins":
            return f"{self.size} bins from {self.value_min:g} to {self.value_max:g}"
        names = {"value": "a value", "logit": "the logit of a value"}
        return names.get(self.output, f"{self.size} {self.output}")


class ValueModel(RowReader):
    """Wraps `hf`, any *ForTokenClassification model whose backbone is causal and whose labels are a `ValueHead`.

    levels: of a head that gives a distribution, the part whose mean is the value.
    """

    def __init__(
        self, hf: Any, *, packed: bool = False, shared: bool = False, levels: tuple[float, float] = ALL_LEVELS
    ) -> None:
        super().__init__(hf, packed=packed, shared=shared)
        self.reading, self.levels = ValueHead.of(hf.config) or ValueHead(), levels
        if levels != ALL_LEVELS and not self.reading.is_distribution:
            raise UserError(
                f"critic.value_levels={list(levels)} reads a part of a distribution, and the head gives {self.reading}:"
                " take a critic of critic.value_loss=quantile or hl_gauss, or leave it at [0, 1]"
            )
        self.head.float()

    @property
    def head(self) -> nn.Linear:
        """The map from a hidden state to the labels; it runs in float32 whatever the backbone runs in. ValueError: the
        class is laid out in another way."""
        for name in HEAD_NAMES:
            head = getattr(self.hf, name, None)
            if isinstance(head, nn.Linear) and head.out_features == self.hf.config.num_labels:
                return head
        raise ValueError(f"{type(self.hf).__name__} has no linear head named {' or '.join(HEAD_NAMES)}")

    def float32_modules(self) -> list[nn.Module]:
        """The parts that a mixed-precision engine must leave in float32."""
        return [self.head]

    def forward(
        self, rows: Mapping[str, Tensor], *, raw: bool = False, with_quantiles: bool = False
    ) -> dict[str, Tensor]:
        """Float32 `values` [b, T]: the value of the state before response token t, 0 beyond a response's length.

        with_quantiles: also `quantiles` [b, T, K], rising, of a head that gives a distribution. raw: also
        `head_outputs`, which value losses train: [b, T], or [b, T, K] of a head of K outputs. `rows` as in
        PolicyModel.forward.
        """
        compact = self.compact(rows)
        states = compact.read_by(self.hf.base_model).last_hidden_state
        outputs = self.head(compact.gather(states).float()).float()
        if self.levels == ALL_LEVELS:
            values = self.reading.values(outputs)
        else:
            values = tail_mean(*self.reading.distribution(outputs), *self.levels)
        out = {"values": compact.scatter(values)}
        if raw:
            out["head_outputs"] = compact.scatter(outputs.squeeze(-1))
        if with_quantiles and self.reading.is_distribution:
            atoms, weights = self.reading.distribution(outputs)
            out["quantiles"] = compact.scatter(atoms if atoms.ndim > 1 else quantiles_of(atoms, weights))
        return out
