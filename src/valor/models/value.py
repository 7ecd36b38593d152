"""The value function: a Hugging Face token-classification model. Its labels give a value, its logit, or bins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from valor.algorithms import hl_gauss_value
from valor.errors import UserError
from valor.models.rows import RowReader

# The names that transformers gives the head of its *ForTokenClassification classes.
HEAD_NAMES = ("score", "classifier")


@dataclass(frozen=True)
class ValueHead:
    """How a value is read from the head's `size` outputs z; an exported critic's config.json says it.

    value: z itself. logit: the sigmoid of z. bins: the mean, under softmax z, of the centres of equal bins of
    [value_min, value_max]. label: the probability of
    one of `size` labels (a process reward model).
    """

    output: Literal["value", "logit", "bins", "label"] = "value"
    size: int = 1
    value_min: float = 0.0
    value_max: float = 1.0
    label: int = 0

    @staticmethod
    def of(config: Any) -> ValueHead | None:
        """What a Hugging Face config says; None if it says nothing. UserError: a head of a kind that is not read."""
        output = getattr(config, "value_head_output", None)
        if output is None:
            return None
        if output not in ("value", "logit", "bins", "label"):
            raise UserError(f"the head of this critic gives {output}, which nothing here reads: train another one")
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
        if self.output == "label":
            return z.softmax(-1)[..., self.label]
        return z.squeeze(-1).sigmoid() if self.output == "logit" else z.squeeze(-1)

    def __str__(self) -> str:
        if self.output == "bins":
            return f"{self.size} bins from {self.value_min:g} to {self.value_max:g}"
        names = {"value": "a value", "logit": "the logit of a value"}
        return names.get(self.output, f"{self.size} {self.output}")


class ValueModel(RowReader):
    """Wraps `hf`, any *ForTokenClassification model whose backbone is causal and whose labels are a `ValueHead`."""

    def __init__(self, hf: Any, *, packed: bool = False, shared: bool = False) -> None:
        super().__init__(hf, packed=packed, shared=shared)
        self.reading = ValueHead.of(hf.config) or ValueHead()
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

    def forward(self, rows: Mapping[str, Tensor], *, raw: bool = False) -> dict[str, Tensor]:
        """Float32 `values` [b, T]: the value of the state before response token t, 0 beyond a response's length.

        raw: also `head_outputs`, which value losses train: [b, T], or [b, T, K] of a head of K outputs. `rows` as in
        PolicyModel.forward.
        """
        compact, last = self.compact(rows), self.hf.config.get_text_config().vocab_size - 1
        # A policy with more rows of padding in its vocabulary samples what this one has not.
        compact = replace(compact, input_ids=compact.input_ids.clamp(max=last))
        states = compact.read_by(self.hf.base_model).last_hidden_state
        outputs = self.head(compact.gather(states).float()).float()
        out = {"values": compact.scatter(self.reading.values(outputs))}
        if raw:
            out["head_outputs"] = compact.scatter(outputs.squeeze(-1))
        return out
