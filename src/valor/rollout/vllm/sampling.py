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

from valor.rollout.base import Request, SamplingParams
from valor.rollout.sampling import BatchSampler, uniform_stream
from valor.rollout.vllm.internals import process_dict_updates

_KEY = "valor"
LOGPROBS_MODE = "processed_logits"  # vLLM then reports the chosen token's logit after this processor


class Row(NamedTuple):
    """A sequence in vLLM's batch; `output` is vLLM's own growing list of its tokens after `so_far`."""

    params: SamplingParams
    uniforms: np.ndarray
    so_far: list[int]
    output: list[int]
    stop_token: int

    @property
    def stopped(self) -> bool:
        """Whether its last token completes a stop text."""
        stop = self.params.stop
        return stop is not None and stop.complete([*self.so_far, *self.output])


def as_greedy(request: Request, stop_token_ids: list[int]) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for a request that `ChosenToken` samples."""
    so_far = request.begun.token_ids
    return {
        "temperature": 0.0,
        "max_tokens": request.params.max_tokens - len(so_far),
        "stop_token_ids": stop_token_ids,
        "logprobs": 0,
        "extra_args": {_KEY: (request.params, request.seed, so_far, (stop_token_ids or [0])[0])},
    }


class ChosenToken(LogitsProcessor):
    """Samples each row and masks all other tokens; the sampled token's logit becomes its log-probability."""

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
        uniforms = [row.uniforms[len(row.so_far) + len(row.output)] for row in rows]
        tokens, log_probs = self._sampler(logits, torch.tensor(uniforms, dtype=torch.float64).to(logits.device))
        for index, row in enumerate(rows):
            if row.stopped:
                tokens[index] = row.stop_token  # ends the sequence after its stop text, and is thrown away
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], log_probs[:, None])

    def _row(self, params: VLLMParams, prompt: list[int] | None, output: list[int]) -> Row:
        if params.extra_args is None:  # vLLM's own trial run
            return Row(SamplingParams(), uniform_stream((0,), 1), [], [], 0)
        original, seed, so_far, stop_token = params.extra_args[_KEY]
        return Row(original, uniform_stream(seed, original.max_tokens), so_far, output, stop_token)
