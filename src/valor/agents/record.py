"""Episodes on file: what it takes to read one, and to train on it again without its tools, programs and servers.

A record is a JSON object: `key`, `messages`, `prompt_ids`, `turns`, and the other fields of the Episode. Each turn has
the fields of a Turn, and the `text` and `observation` that its tokens are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from valor.agents.chat import Chat
from valor.agents.episode import Episode, Turn
from valor.data.batch import Batch, Episodes
from valor.rollout.base import Span, spans_of

Record = Mapping[str, Any]
_FIELDS = ("finish_reason", "prompt_ids", "outcome", "info", "error")  # of an Episode, as they are
_TURN_FIELDS = ("token_ids", "log_probs", "observation_ids", "prompt_ids", "reward")
_COLUMNS = ("responses", "turn_ids", "rollout_log_probs", "weights_versions", "turn_rewards")


def episode_records(prompts: Batch, rows: Batch, chat: Chat) -> Iterator[Record]:
    """The records of episodes, one for each of `prompts`; `rows` are those of `valor.agents.episode.episode_rows`."""
    for number, found in enumerate(Episodes(rows).rows):
        first, prompt_ids = found[0], _prompt(rows, found[0])
        turns = [turn for row in found for turn in _turns(rows, row, None if row == first else _prompt(rows, row))]
        yield {
            "key": prompts["episode_key"][number].tolist(),
            "messages": prompts.objects["messages"][number],
            "prompt": chat.decode(prompt_ids),
            "prompt_ids": prompt_ids,
            "finish_reason": rows.objects["finish_reason"][first],
            "outcome": rows.objects["outcome"][first],
            "info": rows.objects["episode_info"][first],
            "error": rows.objects["episode_error"][first],
            "turns": [asdict(turn) | _texts(turn, chat) for turn in turns],
        }


def recorded_episode(record: Record) -> Episode:
    """The episode of a record that was read from a file."""
    turns = (
        Turn(spans=tuple(Span(*span) for span in turn["spans"]), **{name: turn[name] for name in _TURN_FIELDS})
        for turn in record["turns"]
    )
    return Episode(tuple(record["key"]), tuple(turns), **{name: record[name] for name in _FIELDS})


def as_json(value: Any) -> Any:
    """What a value is after it has been written and read."""
    return json.loads(json.dumps(value, default=str))


def _prompt(rows: Batch, row: int) -> list[int]:
    return rows["prompts"][row, : int(rows["prompt_lengths"][row])].tolist()


def _turns(rows: Batch, row: int, prompt_ids: list[int] | None) -> list[Turn]:
    """The turns of a row; what the policy was told behind the last one is a turn in which it says nothing."""
    length = int(rows["response_lengths"][row])
    ids, turn_ids, log_probs, versions, rewards = (rows[name][row, :length].tolist() for name in _COLUMNS)
    turns: list[Turn] = []
    told: Sequence[int] = ()
    for number, places in groupby(range(length), key=turn_ids.__getitem__):
        at = list(places)
        part = slice(at[0], at[-1] + 1)
        if number:
            turns.append(Turn(ids[part], log_probs[part], spans_of(versions[part]), told, prompt_ids, rewards[at[-1]]))
            told, prompt_ids = (), None
        else:
            told = ids[part]
    return [*turns, Turn((), (), (), told, prompt_ids)] if told or not turns else turns


def _texts(turn: Turn, chat: Chat) -> dict[str, str]:
    return {"text": chat.decode(turn.token_ids), "observation": chat.decode(turn.observation_ids)}
