"""Responses to prompts, by an engine beside the actor, or by one in a pool of its own that is sent the weights."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import GenerationConfig

from valor.agents.agents import Agents
from valor.agents.episode import TOKEN_COLUMNS, Episode, episode_rows, with_text
from valor.agents.loops import answer, tasks_of
from valor.agents.runner import EpisodeRunner, Sink
from valor.config import ModelConfig, PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.models.load import load_image_files, load_model_config, load_policy_tokenizer
from valor.models.routing import ROUTES
from valor.rollout.base import Elsewhere, SamplingParams
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.spec import BuildContext
from valor.rollout.transfer import MEETING, TIMEOUT, NamedTensors, WeightChannel
from valor.workers.actor import Address
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole


class RolloutWorker:
    """One rank of the rollout, whose engine is the one that `rollout.name` names."""

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts) -> None:
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        self._context = context
        self._actor: ModelRole | None = context.roles.get("actor")  # None: in a pool of its own
        self._channel: WeightChannel | None = None
        self._spec = GENERATION_ENGINES[rollout.name]
        beside = None if self._actor is None else self._actor.engine
        ends = end_token_ids(model, facts.eos_token_ids)
        options = None if config.data.image_key is None else config.data.mm_processor_kwargs
        records = config.actor_rollout_ref.actor.router_replay.mode == "R3"
        self.engine = self._spec.build(BuildContext(rollout, model, ends, context.device, beside, options, records))
        self._tokenizer = load_policy_tokenizer(config)
        by_episodes = config.plays_episodes
        images = load_image_files(config, self._tokenizer) if options is not None and by_episodes else None
        self._agents = Agents(config, self._tokenizer, images) if by_episodes else None
        self._config = rollout
        self._ahead: EpisodeRunner | None = None  # of `generate_ahead`: its episodes outlive the calls

    @property
    def data_parallel_rank(self) -> int:
        """Number of the share of the requests that this rank generates."""
        return self._context.rank // self.engine.parallel_size

    @Dispatch("all", light=True)
    def needs_weights(self, version: int) -> bool:
        """Whether the engine generates with other weights than those after `version` updates, and should not."""
        return self.engine.weight_mode != "fixed" and self.engine.weights_version != version

    @Dispatch("all")
    def update_weights(self) -> None:
        """Beside the actor: give the engine its present weights."""
        assert self._actor is not None, "a rollout in a pool of its own receives weights"
        version = self._actor.engine.version
        if self.engine.weight_mode == "shared":
            self.engine.sync_weights(version=version)
            return
        with self._actor.on_device() as engine:
            self.engine.sync_weights(engine.named_weights(self._spec.weight_names), version=version)

    @Dispatch("all", sent_weights=True)
    def receive_weights(self, address: Address, version: int) -> None:
        """In a pool of its own: take the weights that the actor sends at the same time (`send_weights`).

        RuntimeError unless the engine then holds them bit for bit.
        """
        if self._channel is None:
            rank, size, device = self._context.rank, self._context.world_size, self._context.device
            store = TCPStore(*address, timeout=MEETING)
            store.set_timeout(TIMEOUT)
            self._channel = WeightChannel(store, rank + 1, size + 1, device)

        def take(weights: NamedTensors) -> int | None:
            self.engine.sync_weights(weights, version=version)
            return self.engine.weights_checksum

        self._channel.receive(take)

    @Dispatch("all")
    def sleep(self) -> None:
        """Leave the device to training, if it is the same: called when a step has all its samples."""
        if self._actor is not None:
            self.engine.sleep()

    def close(self) -> None:
        """End the engine, and the episodes under way."""
        if self._ahead is not None:
            self._ahead.close()
        if self._agents is not None:
            self._agents.close()
        self.engine.close()

    @Dispatch("dp", keep_together="uid", stays=(*TOKEN_COLUMNS, ROUTES), sent_weights=True)
    def generate(self, prompts: Batch, params: SamplingParams, *, sink: Sink | None = None) -> Batch:
        """One response for each row of `prompts` (n samples of a prompt are n rows that share a `uid`).

        Needs `prompts`, `prompt_lengths` and `episode_key` [B, 3] = (run seed, step, sample number): the key alone
        decides what is drawn, whichever rank draws it. Returns the columns of `episode_rows` and `response_text`; where
        agents play, which also read the rows' objects, one prompt may have several rows (`episode`). `sink` gets each
        episode as soon as it has ended, with its texts instead of its turns.
        """
        with self._generating():
            if self._follows and self._agents is not None:
                self.engine.serve(Elsewhere())
                return Batch()
            reports = None if sink is None or self._follows else partial(self._report, sink)
            rows = episode_rows(self._runner().run(self.engine, tasks_of(prompts, params), reports))
        return with_text(rows, self._decoded)

    @Dispatch("all", sent_weights=True)
    def generate_ahead(
        self, *, sink: Callable[[tuple[Episode, int]], None], feed: Callable[[], Sequence[Any]]
    ) -> tuple[float, float] | None:
        """Play episodes until `feed` brings a pause: calls of `EpisodeRunner`'s `add`, `drop` and `pause`, as tuples.

        `sink` gets each episode that has ended, with the number of the attempt at it. Episodes under way at a pause go
        on with the next call: tools meanwhile, generation by the weights of then. Returns this call's seconds, and
        those of them in which the engine had nothing to do.
        """
        with self._generating():
            if self._follows:
                self.engine.serve(Elsewhere())
                return None
            runner = self._ahead = self._ahead or self._runner()

            def listen() -> None:
                for method, *arguments in feed():
                    getattr(runner, method)(*arguments)

            began, idle = time.monotonic(), runner.idle_seconds
            runner.serve(self.engine, lambda *ended: sink(ended), listen)
            return time.monotonic() - began, runner.idle_seconds - idle

    @property
    def _follows(self) -> bool:
        """Whether another of the processes that generate together has the requests."""
        return self._context.rank % self.engine.parallel_size > 0

    def _runner(self) -> EpisodeRunner:
        if self._agents is not None:
            return self._agents.runner()
        most, longest = self._config.max_num_seqs, self._config.max_model_len
        return EpisodeRunner(
            lambda task, runner: answer(task, runner.generate), most=most, max_tokens=longest, one_turn=True
        )

    def _report(self, sink: Sink, episode: Episode) -> None:
        """Pass an episode on as graders read it: with its texts instead of its turns."""
        text, turns = self._decoded([episode.response_ids])[0], episode.turn_texts_by(self._decoded)
        sink(replace(episode, turns=(), prompt_ids=None, info={}, text=text, turn_texts=turns))

    def _decoded(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        return self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """The device is the engine's, or that of the weights which it shares, for the block."""
        shared = self._actor is not None and self.engine.weight_mode == "shared"
        if not shared:
            self._context.make_room()
        with self._actor.on_device() if self._actor is not None and shared else nullcontext():
            yield


def end_token_ids(model: ModelConfig, of_tokenizer: list[int]) -> list[int]:
    """End tokens of the tokenizer and of the model's own files. UserError: the model has no such token."""
    try:
        of_model: Any = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:
        of_model = GenerationConfig.from_model_config(load_model_config(model)).eos_token_id
    if of_model is None or isinstance(of_model, int):
        of_model = [] if of_model is None else [of_model]
    ends: list[int] = sorted({*of_tokenizer, *of_model})
    size = int(load_model_config(model).get_text_config().vocab_size)
    if ends and not 0 <= ends[0] <= ends[-1] < size:
        raise UserError(
            f"the model '{model.path}' knows {size} tokens, and its end is to be one of {ends}: correct eos_token_id "
            "in its generation_config.json and config.json"
        )
    return ends
