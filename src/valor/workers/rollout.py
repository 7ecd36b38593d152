"""Responses to prompts, by an engine that shares the actor's weights or is given them after every update."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from valor.config import ModelConfig, RolloutConfig
from valor.data.batch import Batch, pad_rows
from valor.models.export import published_weights
from valor.rollout.base import Output, Request, RolloutEngine, SamplingParams
from valor.rollout.finished import Finished, tell_finished
from valor.rollout.native import NativeEngine
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext


class RolloutWorker:
    """One rank of the rollout; lives in the actor's process. `config.name` is its engine: native generates with the
    actor's own parameters (no copy), vllm with a copy of them in its own layout."""

    engine: RolloutEngine

    def __init__(
        self, context: WorkerContext, *, config: RolloutConfig, model: ModelConfig, eos_token_ids: list[int]
    ) -> None:
        self._actor = context.roles["actor"]
        hf = self._actor.engine.module.hf
        own = getattr(hf.generation_config, "eos_token_id", None)
        ends = {*eos_token_ids, *([] if own is None else [own] if isinstance(own, int) else own)}
        self._shares_weights = config.name == "native"
        if self._shares_weights:
            self.engine = NativeEngine(
                hf,
                eos_token_ids=sorted(ends),
                unsharded=self._actor.engine.unsharded,
                max_num_seqs=config.max_num_seqs,
            )
        else:
            from valor.rollout.vllm import VLLMEngine  # 10 seconds

            self.engine = VLLMEngine(config, model, hf.config, eos_token_ids=sorted(ends), device=context.device)

    @dispatch("all")
    def update_weights(self) -> None:
        """Give the engine the actor's present weights, unless it has them. The version is the number of updates."""
        version = self._actor.engine.counters.updates
        if self.engine.weights_version == version:
            return
        if self._shares_weights:
            self.engine.sync_weights(version=version)
            return
        with self._actor.on_device() as engine:
            weights = published_weights(engine.module, engine.full_parameters())
            self.engine.sync_weights(weights, version=version)

    @dispatch("all")
    def sleep(self) -> None:
        """Leave the device to training: called when a step has all its samples."""
        self.engine.sleep()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

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

        self.update_weights()
        with self._actor.on_device() if self._shares_weights else nullcontext():
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
