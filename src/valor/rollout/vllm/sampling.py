"""Valor's own choice of tokens inside vLLM: the same numbers decide as in the native engine.

vLLM draws a random number for every entry of the vocabulary and, with a seed, one row after another: more work than
the forward pass of a small model. It also reports log-probs at temperature 1, or of the truncated distribution. So
requests go to it as greedy ones, and this logits processor leaves it one token to choose.
"""

# pyright: reportMissingImports=false
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VLLMParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from valor.rollout.base import Request, SamplingParams
from valor.rollout.sampling import BatchSampler, uniform_stream

_KEY = "valor"
LOGPROBS_MODE = "processed_logits"  # vLLM then reports what the processor left as the chosen token's logit


class Row(NamedTuple):
    """A sequence in vLLM's batch; `output` is vLLM's own growing list of its tokens, behind `so_far`."""

    params: SamplingParams
    uniforms: np.ndarray
    so_far: list[int]
    output: list[int]
    end: int  # one of its stop tokens

    @property
    def stopped(self) -> bool:
        """Whether its last token completes a stop text."""
        stop = self.params.stop
        return stop is not None and stop.complete([*self.so_far, *self.output] if self.so_far else self.output)


def as_greedy(request: Request, stop_token_ids: list[int]) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for a request that `ChosenToken` samples."""
    so_far = request.begun.token_ids
    end = stop_token_ids[0] if stop_token_ids else 0
    return {
        "temperature": 0.0,
        "max_tokens": request.params.max_tokens - len(so_far),
        "stop_token_ids": stop_token_ids,
        "logprobs": 0,
        "extra_args": {_KEY: (request.params, request.seed, so_far, end)},
    }


class ChosenToken(LogitsProcessor):
    """Samples each row, and leaves the sampled token alone, with its log-probability in the place of its logit."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}
        self._sampler: BatchSampler | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._rows, batch_update, self._row):
            self._sampler = None

    def apply(self, logits: Tensor) -> Tensor:
        rows = [self._rows[index] for index in range(logits.shape[0])]
        if self._sampler is None:
            self._sampler = BatchSampler([row.params for row in rows], logits.device)
        # A row whose prompt is not complete is sampled too; vLLM throws that token away.
        drawn = [row.uniforms[len(row.so_far) + len(row.output)] for row in rows]
        uniforms = torch.tensor(drawn, dtype=torch.float64)
        tokens, log_probs = self._sampler(logits, uniforms.to(logits.device))
        for place, row in enumerate(rows):
            if row.stopped:
                tokens[place] = row.end  # thrown away: it ends the sequence after the text that does
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], log_probs[:, None])

    def _row(self, params: VLLMParams, prompt: list[int] | None, output: list[int]) -> Row:
        if params.extra_args is None:  # vLLM's own trial run
            return Row(SamplingParams(), uniform_stream((0,), 1), [], [], 0)
        own, seed, so_far, end = params.extra_args[_KEY]
        return Row(own, uniform_stream(seed, own.max_tokens), so_far, output, end)
