"""The policy: a Hugging Face causal language model seen as log-probabilities of response tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from valor.models.dropout import disable_dropout
from valor.models.rows import compact_rows
from valor.models.token_log_probs import LogitMap, log_probs_from_logits, sum_pi_squared, token_log_probs

logger = logging.getLogger(__name__)


class PolicyModel(nn.Module):
    """Wraps `hf`, any causal language model of transformers.

    Hidden states of the base model, then the head only at the positions that predict response tokens. Architectures
    whose head is more than a linear map with a scale and a soft cap go through their own full logits instead.
    """

    def __init__(self, hf: Any) -> None:
        super().__init__()
        disable_dropout(hf)
        self.hf = hf
        self.eval()
        self.logit_map = find_logit_map(hf)

    def forward(
        self,
        rows: Mapping[str, Tensor],
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """Float32 `log_probs` [b, T] of the responses under softmax(logits / temperature); if asked, its `entropy` and
        `sum_pi_squared` (Σ_v π(v)², without gradient).

        `rows` has prompts [b, P], prompt_lengths [b], responses [b, T], response_lengths [b], right-padded. Positions
        beyond a response's length are 0.
        """
        compact = compact_rows(rows)
        squares: Tensor | None = None
        if self.logit_map is None:
            logits = compact.gather(self.hf(input_ids=compact.input_ids, use_cache=False).logits)
            log_probs, entropy = log_probs_from_logits(
                logits, compact.targets, temperature=temperature, with_entropy=with_entropy
            )
            if with_sum_pi_squared:
                squares = (logits.detach().float() / temperature).softmax(-1).square().sum(-1)
        else:
            states = self.hf.base_model(input_ids=compact.input_ids, use_cache=False).last_hidden_state
            states = compact.gather(states)
            head = self.hf.get_output_embeddings()
            log_probs, entropy = token_log_probs(
                states,
                head.weight,
                head.bias,
                compact.targets,
                temperature=temperature,
                logit_map=self.logit_map,
                with_entropy=with_entropy,
            )
            if with_sum_pi_squared:
                squares = sum_pi_squared(
                    states, head.weight, head.bias, temperature=temperature, logit_map=self.logit_map
                )
        out = {"log_probs": compact.scatter(log_probs)}
        if entropy is not None:
            out["entropy"] = compact.scatter(entropy)
        if squares is not None:
            out["sum_pi_squared"] = compact.scatter(squares)
        return out


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
        found = guess.apply_(head(states).float())
    tolerance = 1e-5 if head.weight.dtype is torch.float32 else 2e-2
    if expected.shape == found.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
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
