"""Episodes on file: what it takes to read one, and to play it again without its tools, programs and servers.

A record is a JSON object: `key`, `messages`, `prompt_ids`, `turns`, `requests`, and the other fields of the Episode.
Each turn has the fields of a Turn, and the `text` and `observation` that its tokens are. `requests` are what the
generation engine was asked: `seed`, `sampling`, and `prompt_ids` and `token_ids` where the turns do not tell them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from valor.agents.chat import Chat
from valor.agents.episode import Episode, Turn
from valor.agents.loops import Generate, Task
from valor.errors import UserError
from valor.rollout.base import Request, SamplingParams, Span

Record = Mapping[str, Any]
_FIELDS = ("finish_reason", "prompt_ids", "outcome", "info", "error")  # of an Episode, as they are


def episode_record(task: Task, episode: Episode, asked: Sequence[tuple[Request, list[int]]], chat: Chat) -> Record:
    """The record of a task's episode; `asked`: what it had generated, in order, with the tokens that came back."""
    turns = [asdict(turn) | _texts(turn, chat) for turn in episode.turns]
    contexts = [*_contexts(episode.prompt_ids or (), episode.turns)]
    requests = []
    for i, (request, token_ids) in enumerate(asked):
        one = {"seed": request.seed, "sampling": _sampling(request.params)}
        told = i < len(turns) and contexts[i] == list(request.prompt_ids) and turns[i]["token_ids"] == token_ids
        requests.append(one if told else {**one, "prompt_ids": list(request.prompt_ids), "token_ids": token_ids})
    return {
        "key": list(task.key),
        "temperature": task.params.temperature,
        "messages": task.row["messages"],
        "prompt": chat.decode(episode.prompt_ids or ()),
        **{name: getattr(episode, name) for name in _FIELDS},
        "turns": turns,
        "requests": requests,
    }


async def play_again(task: Task, record: Record, generate: Generate, chat: Chat) -> Episode:
    """The recorded episode, once the policy has said the same in each of its turns.

    UserError: it was asked something else, or says something else.
    """
    if as_json(task.row["messages"]) != record["messages"]:
        raise UserError(f"{_name(task)} was recorded with another prompt: {_REMEDY}")
    turns = tuple(_turn(one) for one in record["turns"])
    contexts = [*_contexts(record["prompt_ids"] or (), turns)]
    for i, request in enumerate(record["requests"]):
        prompt_ids = request.get("prompt_ids") or contexts[i]
        expected = list(request["token_ids"] if "token_ids" in request else turns[i].token_ids)
        output = await generate(prompt_ids, _params(task.params, request["sampling"], chat), tuple(request["seed"]))
        if output.token_ids != expected:
            said, before = (repr(chat.decode(ids)[:200]) for ids in (output.token_ids, expected))
            raise UserError(f"{_name(task)}, turn {i + 1}: the policy says {said}, recorded is {before}: {_REMEDY}")
    return Episode(task.key, turns, **{name: record[name] for name in _FIELDS})


def as_json(value: Any) -> Any:
    """What a value is after it has been written and read."""
    return json.loads(json.dumps(value, default=str))


_REMEDY = "replay with the settings, data and weights of the recorded run, both with agent.deterministic=true"


def _name(task: Task) -> str:
    seed, step, sample = task.key
    return f"actor_rollout_ref.rollout.agent.replay_dir: episode {sample} of step {step} (seed {seed})"


def _texts(turn: Turn, chat: Chat) -> dict[str, str]:
    return {"text": chat.decode(turn.token_ids), "observation": chat.decode(turn.observation_ids)}


def _turn(record: Record) -> Turn:
    spans = tuple(Span(*span) for span in record["spans"])
    names = ("token_ids", "log_probs", "observation_ids", "prompt_ids", "reward")
    return Turn(spans=spans, **{name: record[name] for name in names})


def _contexts(prompt_ids: Sequence[int], turns: Sequence[Turn]) -> Iterator[list[int]]:
    """What the policy had before it in each turn."""
    row = list(prompt_ids)
    for turn in turns:
        row = [*row, *turn.observation_ids] if turn.prompt_ids is None else list(turn.prompt_ids)
        yield row
        row = [*row, *turn.token_ids]


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {**asdict(replace(params, stop=None)), "stop": params.stop and params.stop.texts}


def _params(params: SamplingParams, sampling: Mapping[str, Any], chat: Chat) -> SamplingParams:
    stop = chat.stop_texts(*sampling["stop"]) if sampling["stop"] else None
    return replace(params, **{**sampling, "stop": stop, "stop_token_ids": tuple(sampling["stop_token_ids"])})
