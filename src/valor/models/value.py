"""The value function: a Hugging Face token-classification model of one label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from valor.models.dropout import disable_dropout
from valor.models.rows import compact_rows

# The names that transformers gives the head of its *ForTokenClassification classes.
HEAD_NAMES = ("score", "classifier")


class ValueModel(nn.Module):
    """Wraps `hf`, any *ForTokenClassification model with num_labels = 1 whose backbone is causal."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        disable_dropout(hf)
        self.hf = hf
        self.head.float()
        self.eval()

    @property
    def head(self) -> nn.Linear:
        """The map from a hidden state to a value; it runs in float32 whatever the backbone runs in."""
        return getattr(self.hf, head_name(self.hf))

    def float32_modules(self) -> list[nn.Module]:
        """The parts that a mixed-precision engine must leave in float32."""
        return [self.head]

    def forward(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Float32 `values` [b, T]: the value of the state before response token t, 0 beyond a response's length.

        `rows` as in PolicyModel.forward.
        """
        compact = compact_rows(rows)
        states = self.hf.base_model(input_ids=compact.input_ids, use_cache=False).last_hidden_state
        values = self.head(compact.gather(states).float()).squeeze(-1)
        return {"values": compact.scatter(values.float())}


def head_name(hf: Any) -> str:
    """The attribute that holds the classification head; ValueError if the class is laid out in another way."""
    for name in HEAD_NAMES:
        head = getattr(hf, name, None)
        if isinstance(head, nn.Linear) and head.out_features == 1:
            return name
    raise ValueError(f"{type(hf).__name__} has no linear head of one output named {' or '.join(HEAD_NAMES)}")
