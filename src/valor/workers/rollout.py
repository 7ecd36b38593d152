"""Responses to prompts, by the native engine on the actor's own weights."""

from __future__ import annotations

from typing import Any

import torch

from valor.config import RolloutConfig
from valor.data.batch import Batch, pad_rows
from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.finished import Finished, tell_finished
from valor.rollout.native import NativeEngine
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext


class RolloutWorker:
    """One rank of the rollout; lives in the actor's process and generates with the actor's parameters (no copy)."""

    def __init__(self, context: WorkerContext, *, config: RolloutConfig, eos_token_ids: list[int]) -> None:
        self._actor = context.roles["actor"]
        hf = self._actor.engine.module.hf
        own = getattr(hf.generation_config, "eos_token_id", None)
        ends = {*eos_token_ids, *([] if own is None else [own] if isinstance(own, int) else own)}
        self.engine = NativeEngine(
            hf,
            eos_token_ids=sorted(ends),
            unsharded=self._actor.engine.unsharded,
            max_num_seqs=config.max_num_seqs,
        )

    @dispatch("dp", keep_together="uid")
    def generate(self, prompts: Batch, params: SamplingParams) -> Batch:
        """One response for each row of `prompts` (n samples of a prompt are n rows that share a `uid`).

        Needs `prompts`, `prompt_lengths` and `sample_key` [B, 3] = (run seed, step, sample number): the key alone
        decides what is drawn, whichever rank draws it. Returns responses, response_lengths, response_mask,
        rollout_log_probs and the objects `finish_reason`.
        """
        requests = [
            Request(str(i), row[: int(length)], params, tuple(key))
            for i, (row, length, key) in enumerate(
                zip(
                    prompts["prompts"].tolist(),
                    prompts["prompt_lengths"].tolist(),
                    prompts["sample_key"].tolist(),
                    strict=True,
                )
            )
        ]
        keys = prompts["sample_key"].tolist()

        def finished(output: Output) -> None:
            tell_finished([Finished(tuple(keys[int(output.request_id)]), output.token_ids)])

        with self._actor.on_device():
            outputs = self.engine.generate(requests, finished)
        responses, lengths = pad_rows([o.token_ids for o in outputs], torch.long)
        log_probs, _ = pad_rows([o.log_probs for o in outputs], torch.float32)
        mask = (torch.arange(responses.shape[1]) < lengths[:, None]).float()
        columns: dict[str, Any] = {
            "responses": responses,
            "response_lengths": lengths,
            "response_mask": mask,
            "rollout_log_probs": log_probs,
        }
        return Batch(columns, {"finish_reason": [o.finish_reason for o in outputs]})
