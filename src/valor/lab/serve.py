"""`valor serve MODEL`: an OpenAI-compatible server to try agents with, which records the episodes that they play."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from valor.agents.chat import Chat, Message
from valor.agents.episode import Episode, episode_rows
from valor.agents.gateway import Gateway, Session
from valor.agents.gateway_requests import read_messages
from valor.agents.http_server import (
    MAX_CONNECTIONS,
    Refused,
    authorise,
    listen,
    read_object,
)
from valor.agents.loops import Limits, LoopContext, Task
from valor.agents.record import episode_records
from valor.agents.runner import EpisodeRunner
from valor.collector.generation import sampling_params
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.tracking.console import say
from valor.tracking.rundir import write_atomically

if TYPE_CHECKING:
    from starlette.requests import Request

_UNNAMED = "v1-"  # begins the names of sessions that were not given one
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)


class OpenGateway(Gateway):
    """A gateway whose sessions begin with their first request, on the running event loop, which is that of `runner`.

    A session is what is asked below `/sessions/NAME/v1`; below `/v1`, a request and those that go on from its answer.
    When there are too many, the one that has been idle for longest is forgotten. Each one's record is written to
    `folder`, as NAME.jsonl, after every turn.
    """

    places = (*Gateway.places, "")
    most_connections = MAX_CONNECTIONS

    def __init__(
        self,
        listening: Any,
        context: LoopContext,
        runner: EpisodeRunner,
        api_key: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self._context, self._runner, self._api_key, self._folder = context, runner, api_key, folder
        rollout = context.config.actor_rollout_ref.rollout
        context.chat.use_format(rollout.multi_turn.format)
        self._most = rollout.agent.max_concurrent_episodes
        self._loop = asyncio.get_running_loop()
        self._begun = 0
        super().__init__(listening)

    async def find(self, request: Request) -> tuple[Session, dict[str, Any]]:
        """As in every gateway. Refused also: a name that was recorded before, and too many sessions at once."""
        authorise(request, self._api_key)
        fields = await read_object(request)
        name = request.path_params.get("name")
        if name is None:
            fields["messages"] = read_messages(fields)
            unnamed = ((key, session) for key, session in self._sessions.items() if key.startswith(_UNNAMED))
            going_on = (key for key, session in unnamed if session.continued_by(fields))
            name = next(going_on, None) or _UNNAMED + secrets.token_hex(8)
        session = self._sessions.pop(name, None) or self._begin(name)
        self._sessions[name] = session  # in the order of their last requests
        return session, fields

    def _begin(self, name: str) -> Session:
        if not _NAME.fullmatch(name):
            raise Refused(400, "the name of a session has at most 100 letters, digits, dots, dashes and underscores")
        file = None if self._folder is None else self._folder / f"{name}.jsonl"
        if file is not None and file.exists():
            raise Refused(409, f"there is a record of session {name} already: take another name")
        if len(self._sessions) >= self._most:
            idle = next((key for key, session in self._sessions.items() if not session.busy), None)
            if idle is None:
                raise Refused(503, f"{len(self._sessions)} sessions are being answered: ask again later")
            del self._sessions[idle]
        config, chat, limits = self._context.config, self._context.chat, self._context.limits
        task = Task((config.trainer.seed, 0, self._begun), (), sampling_params(config), {})
        self._begun += 1
        after = None if file is None else partial(self._write, file, task)
        return Session(task, self._runner.generate, chat, limits, chat.parse, self._loop, after)

    def _write(self, file: Path, task: Task, episode: Episode, opening: Sequence[Message]) -> None:
        prompts = Batch({"episode_key": torch.tensor([task.key])}, {"messages": [opening]})
        (record,) = episode_records(prompts, episode_rows([episode]), self._context.chat)
        write_atomically(file, json.dumps(record, default=str, ensure_ascii=False) + "\n")


def run(config: PPOConfig, model: str, port: int, host: str, api_key: str | None, record: Path | None) -> int:
    """Serve the model that `config` names, which the console calls `model`, until a signal ends it."""
    listening = listen(host, port)
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
    ended: Future[None] = Future()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: ended.done() or ended.set_result(None))

    async def listen_until_ended(context: LoopContext, _: Task, runner: EpisodeRunner, __: Any) -> Episode:
        """Plays no episode of its own: the sessions do."""
        gateway = OpenGateway(listening, context, runner, api_key, record)
        rollout, most = context.config.actor_rollout_ref.rollout, context.limits
        room = f"at most {most.model:,} tokens, {most.response:,} after a prompt, temperature {rollout.temperature:g}"
        print(f"{gateway.address}/v1: {model} by {rollout.name}, {room}", flush=True)
        await asyncio.wrap_future(ended)
        gateway.close()
        return Episode((), (), "stop")

    try:
        beside_engine(config, listen_until_ended)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def beside_engine(config: PPOConfig, play: Any, roles: Sequence[str] = ()) -> None:
    """Run `play(context, task, runner, host)` beside the engine of the configuration, with the policy's weights.

    The host has these further `roles`.
    """
    from valor.controller.placement import MAIN, resolve_pool
    from valor.data.positions import num_positions
    from valor.data.templates import ask_template, end_tokens
    from valor.models.load import load_model_config, load_policy_tokenizer
    from valor.rollout.registry import GENERATION_ENGINES
    from valor.workers.host import WorkerHost
    from valor.workers.roles import role_specs

    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    tokenizer = load_policy_tokenizer(config)
    ask_template(tokenizer, (), config.data.apply_chat_template_kwargs)
    pool = resolve_pool(config.trainer).pools[MAIN]
    if pool.threads_note:
        say(pool.threads_note)
    GENERATION_ENGINES[rollout.name].check_start(config, pool.world_size)
    positions = num_positions(load_model_config(model).get_text_config())
    longest = min(rollout.max_model_len, positions or rollout.max_model_len)
    chat = Chat(tokenizer, config.data.apply_chat_template_kwargs)
    context = LoopContext(config, chat, Limits(config.episode_length, longest))
    specs = role_specs(config, total_steps=1, eos_token_ids=end_tokens(tokenizer))
    host = WorkerHost(0, 1, pool.device, pool.num_threads)
    host.connect()
    try:
        host.build({name: specs[name] for name in ("actor", "rollout", *roles)})
        if host.call("rollout", "needs_weights", 0):
            host.call("rollout", "update_weights")

        def begin(task: Task, runner: EpisodeRunner) -> Any:
            runner.max_requests = rollout.agent.max_concurrent_episodes  # the sessions ask, and not the one task
            return play(context, task, runner, host)

        runner = EpisodeRunner(begin, most=1, max_tokens=longest)
        with host.context.roles["actor"].on_device():
            runner.run(host.context.roles["rollout"].engine, [Task((), (), sampling_params(config), {})])
    finally:
        host.close()
