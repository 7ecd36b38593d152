"""Responses to prompts, by an engine beside the actor, or by one in a pool of its own that is sent the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import GenerationConfig

from valor.agents.episode import Episode, episode_rows
from valor.config import ModelConfig, RolloutConfig
from valor.data.batch import Batch
from valor.engines.fsdp import TrainEngine
from valor.engines.sharding import DTYPES
from valor.models.export import plain_weights, published_weights
from valor.models.load import load_model_config, load_policy
from valor.models.policy import PolicyModel
from valor.rollout.base import Output, Request, RolloutEngine, SamplingParams, Span
from valor.rollout.native import NativeEngine
from valor.rollout.native_copy import NativeCopy
from valor.rollout.server import ServerEngine
from valor.rollout.transfer import TIMEOUT, NamedTensors, WeightChannel
from valor.workers.dispatch import dispatch
from valor.workers.host import WorkerContext

Address = tuple[str, int]


class RolloutWorker:
    """One rank of the rollout. `config.name` is its engine: native generates with the actor's own parameters where the
    actor is in this process and its layers are whole, else with a copy; vllm always with a copy, in its own layout;
    server asks others."""

    engine: RolloutEngine

    def __init__(
        self, context: WorkerContext, *, config: RolloutConfig, model: ModelConfig, eos_token_ids: list[int]
    ) -> None:
        self._context = context
        self._actor: Any = context.roles.get("actor")  # None: in a pool of its own
        self._channel: WeightChannel | None = None
        self._config = config
        whole_layers = self._actor is not None and self._actor.engine.tensor_parallel == 1
        self._shares_weights = config.name == "native" and whole_layers
        ends = _end_token_ids(model, eos_token_ids)
        if self._actor is not None and self._shares_weights:
            engine = self._actor.engine
            self.engine = NativeEngine(
                engine.module.hf, eos_token_ids=ends, unsharded=engine.unsharded, max_num_seqs=config.max_num_seqs
            )
        elif config.name == "native":
            whole = model.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})  # it is sent merged weights
            policy = load_policy(whole, dtype=DTYPES[config.dtype]).to(context.device).requires_grad_(False)
            self.engine = NativeCopy(policy, eos_token_ids=ends, max_num_seqs=config.max_num_seqs)
        elif config.name == "server":
            self.engine = ServerEngine(config, eos_token_ids=ends)
        else:
            from valor.rollout.vllm import VLLMEngine  # 10 seconds

            hf = load_model_config(model)
            self.engine = VLLMEngine(config, model, hf, eos_token_ids=ends, device=context.device)

    @dispatch("all")
    def update_weights(self) -> None:
        """Beside the actor: give the engine its present weights, unless it has them. The version is the number of
        updates."""
        version = self._actor.engine.counters.updates
        if self._config.keeps_weights or self.engine.weights_version == version:
            return
        if self._shares_weights:
            self.engine.sync_weights(version=version)
            return
        with self._actor.on_device() as engine:
            self.engine.sync_weights(_named_weights(self._config, engine), version=version)

    @dispatch("all")
    def receive_weights(self, address: Address, version: int) -> None:
        """In a pool of its own: take the weights that the `WeightSender` at `address` sends at the same time.

        RuntimeError unless the engine then holds them bit for bit.
        """
        if self._channel is None:
            rank, size, device = self._context.rank, self._context.world_size, self._context.device
            self._channel = WeightChannel(TCPStore(*address, timeout=TIMEOUT), rank + 1, size + 1, device)

        def take(weights: NamedTensors) -> int | None:
            self.engine.sync_weights(weights, version=version)
            return self.engine.weights_checksum

        self._channel.receive(take)

    @dispatch("all")
    def sleep(self) -> None:
        """Leave the device to training, if it is the same: called when a step has all its samples."""
        if self._actor is not None:
            self.engine.sleep()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    @dispatch("dp", keep_together="uid")
    def generate(
        self, prompts: Batch, params: SamplingParams, *, sink: Callable[[Episode], None] | None = None
    ) -> Batch:
        """One response for each row of `prompts` (n samples of a prompt are n rows that share a `uid`).

        Needs `prompts`, `prompt_lengths` and `episode_key` [B, 3] = (run seed, step, sample number): the key alone
        decides what is drawn, whichever rank draws it. Returns the columns of `episode_rows`. An episode goes to
        `sink` as soon as it has ended.
        """
        keys = [tuple(key) for key in prompts["episode_key"].tolist()]
        rows = zip(prompts["prompts"].tolist(), prompts["prompt_lengths"].tolist(), keys, strict=True)
        requests = [Request(str(i), row[:length], params, key) for i, (row, length, key) in enumerate(rows)]

        def finished(output: Output) -> None:
            if sink is not None:
                sink(self._episode(keys[int(output.request_id)], output))

        if self._actor is not None:
            self.update_weights()
        with self._actor.on_device() if self._actor is not None and self._shares_weights else nullcontext():
            outputs = self.engine.generate(requests, finished)
        return episode_rows([self._episode(key, output) for key, output in zip(keys, outputs, strict=True)])

    def _episode(self, key: tuple[int, ...], output: Output) -> Episode:
        spans = (Span(len(output.token_ids), self.engine.weights_version or 0),)
        return Episode.of_one_turn(key, replace(output, spans=spans))


class WeightSender:
    """Beside each rank of the actor whose rollout has a pool of its own: rank 0 sends the weights there."""

    def __init__(self, context: WorkerContext, *, config: RolloutConfig) -> None:
        self._context = context
        self._actor: Any = context.roles["actor"]
        self._config = config
        self._store: TCPStore | None = None
        self._channel: WeightChannel | None = None

    @dispatch("all")
    def version(self) -> int:
        """Of the weights that `send` would send: the number of updates."""
        return self._actor.engine.counters.updates

    @dispatch("all")
    def open(self) -> Address | None:
        """Where receivers meet the sender."""
        if self._context.rank > 0:
            return None
        assert self._context.address is not None, "pools are on Ray, where every process has an address"
        self._store = TCPStore(self._context.address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return self._context.address, self._store.port

    @dispatch("all")
    def send(self, receivers: int) -> None:
        """Send the actor's weights to `receivers` processes, in the engine's dtype and under the names it knows."""
        with self._actor.on_device() as engine:
            weights = _named_weights(self._config, engine)
            if self._store is None:  # the other ranks have a part in gathering
                for _ in weights:
                    pass
                return
            if self._channel is None:
                self._channel = WeightChannel(self._store, 0, receivers + 1, self._context.device)
            bucket_bytes = self._config.checkpoint_engine.update_weights_bucket_megabytes << 20
            self._channel.send(weights, dtype=DTYPES[self._config.dtype], bucket_bytes=bucket_bytes)


def _named_weights(config: RolloutConfig, engine: TrainEngine) -> NamedTensors:
    """The actor's weights, whole, under the names that its rollout engine knows."""
    named = plain_weights if config.name == "native" else published_weights
    return named(cast(PolicyModel, engine.module), engine.full_parameters())


def _end_token_ids(model: ModelConfig, given: list[int]) -> list[int]:
    """`given` and those that the model's own files name."""
    try:
        own = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:
        own = GenerationConfig.from_model_config(load_model_config(model)).eos_token_id
    return sorted({*given, *([] if own is None else [own] if isinstance(own, int) else own)})
