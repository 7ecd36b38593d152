"""The policy: a Hugging Face causal language model seen as log-probabilities of response tokens."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from valor.models.rows import CompactRows, RowReader
from valor.models.states import StateProjection
from valor.models.token_log_probs import (
    Divergence,
    HeadProduct,
    LogitMap,
    likeliest,
    sum_pi_squared,
    token_log_probs,
)

# The same rows' next-token distributions by another policy, before they are computed; see `PolicyModel.forward`.
Reference = Callable[[CompactRows], HeadProduct]

logger = logging.getLogger(__name__)


class PolicyModel(RowReader):
    """Wraps `hf`, any causal language model of transformers.

    Hidden states of the base model, then the head only at the positions that predict response tokens. Architectures
    whose head is more than a linear map with a scale and a soft cap go through their own full logits instead.
    """

    def __init__(self, hf: Any, *, packed: bool = False, shared: bool = False) -> None:
        super().__init__(hf, packed=packed, shared=shared)
        self.logit_map = find_logit_map(hf)

    def forward(
        self,
        rows: Mapping[str, Tensor] | CompactRows,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
        with_hits: bool = False,
        reference: Reference | None = None,
        divergence: Divergence | None = None,
        as_reference: bool = False,
        projection: StateProjection | None = None,
    ) -> Any:
        """Float32 `log_probs` [b, T] of the responses under π = softmax(logits / temperature); if asked, π's `entropy`,
        `sum_pi_squared` (Σ_v π(v)², without gradient), `hits` (1 where the token is the likeliest one), and `full_kl`,
        the exact KL(π ‖ π_ref) to a `reference`, or in its place the `divergence` of π and π_ref.

        `rows` has prompts [b, P], prompt_lengths [b], responses [b, T], response_lengths [b], right-padded, best on the
        CPU. Positions beyond a response's length are 0. as_reference: instead, what another policy's `reference`
        returns, of rows as that policy reads them: its ranks may divide them in another way. projection: `log_probs`
        at temperature 1, and `states` [b, T, K], the projected hidden states before each response token.
        """
        compact = rows if isinstance(rows, CompactRows) else self.compact(rows)
        if projection is not None:
            out = self._read(compact, output_hidden_states=True)
            states = projection([compact.gather(layer) for layer in out.hidden_states])
            product, options = self._product(compact, out), {"temperature": 1.0, "logit_map": self.logit_map}
            log_probs = token_log_probs(product, compact.targets, **options).log_probs
            return {"states": compact.scatter(states), "log_probs": compact.scatter(log_probs)}
        if as_reference:
            assert self.packed or compact.segments is None, "a reference that packs rows where its policy does"
            return self._product(compact, self._read(compact))
        with torch.no_grad():
            other = None if reference is None else reference(compact)
        product, targets = self._product(compact, self._read(compact)), compact.targets
        options: dict[str, Any] = {"temperature": temperature, "logit_map": self.logit_map}
        compared: dict[str, Any] = {"reference": other, "divergence": divergence}
        columns = token_log_probs(product, targets, with_entropy=with_entropy, **compared, **options)._asdict()
        if with_sum_pi_squared:
            columns["sum_pi_squared"] = sum_pi_squared(product, **options)
        if with_hits:
            columns["hits"] = (likeliest(product) == targets).float()
        return {name: compact.scatter(column) for name, column in columns.items() if column is not None}

    def _read(self, compact: CompactRows, **options: Any) -> Any:
        """The base model's output; all of the model's where only its own forward pass knows the logits."""
        return compact.read_by(self.hf if self.logit_map is None else self.hf.base_model, **options)

    def _product(self, compact: CompactRows, out: Any) -> HeadProduct:
        """At the positions that predict response tokens, of what `_read` gave; the logits themselves if it has them."""
        if self.logit_map is None:
            return HeadProduct(compact.gather(out.logits))
        head = self.hf.get_output_embeddings()
        return HeadProduct(compact.gather(out.last_hidden_state), head.weight, head.bias)


def find_logit_map(hf: Any) -> LogitMap | None:
    """How `hf` turns its head's product into logits, checked on a tiny input; None: only its own forward knows."""
    head = hf.get_output_embeddings()
    if type(head) is not nn.Linear or hf.base_model is hf:
        return None
    guess = _configured_logit_map(hf)
    vocab = head.weight.shape[0]
    # A fixed spread of token ids; drawing them would move the global random generator.
    ids = (torch.arange(12, device=head.weight.device).view(2, 6) * 7919 + 13) % vocab
    with torch.no_grad():
        expected = hf(input_ids=ids, use_cache=False).logits.float()
        states = hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = guess.apply_(head(states).float())
    tolerance = 1e-5 if head.weight.dtype is torch.float32 else 2e-2
    if expected.shape == logits.shape and torch.allclose(logits, expected, rtol=tolerance, atol=tolerance):
        return guess
    logger.warning(
        "%s computes its logits in a way of its own: log-probabilities use its full logits (more memory, slower)",
        type(hf).__name__,
    )
    return None


def _configured_logit_map(hf: Any) -> LogitMap:
    """What the config names: Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma 2 caps."""
    config = hf.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitMap(scale, float(softcap) if softcap else None)
