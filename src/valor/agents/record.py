"""Episodes on file: enough to read one, and to train on it again without its tools, programs and servers.

A record is a JSON object: `key`, `messages`, `prompt_ids`, `turns`, and the other fields of the Episode. Each turn has
the fields of a Turn, and its tokens decoded as `text` and `observation`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from valor.agents.chat import Chat
from valor.agents.episode import Episode, Turn, turns_of
from valor.data.batch import Batch, Episodes, unpadded
from valor.data.images import IMAGES
from valor.rollout.base import Span
from valor.tracking.generations import plain

Record = Mapping[str, Any]
_TURN_FIELDS = ("token_ids", "log_probs", "observation_ids", "prompt_ids", "reward")
_COLUMNS = ("responses", "turn_ids", "rollout_log_probs", "weights_versions", "turn_rewards")
# Fields of an Episode, by their columns.
_OBJECTS = {"finish_reason": "finish_reason", "outcome": "outcome", "info": "episode_info", "error": "episode_error"}


def episode_records(prompts: Batch, rows: Batch, chat: Chat) -> Iterator[Record]:
    """The records of episodes, one for each of `prompts`; `rows` are those of `valor.agents.episode.episode_rows`."""
    ids = unpadded(rows, "prompt")
    for number, (first, *others) in enumerate(Episodes(rows).rows):
        turns = [*_turns(rows, first), *(turn for row in others for turn in _turns(rows, row, ids[row]))]
        yield {
            "key": prompts["episode_key"][number].tolist(),
            "messages": prompts.objects["messages"][number],
            "prompt": chat.decode(ids[first]),
            "prompt_ids": ids[first],
            **{field: rows.objects[column][first] for field, column in _OBJECTS.items()},
            "turns": [
                {**asdict(turn), "text": chat.decode(turn.token_ids), "observation": chat.decode(turn.observation_ids)}
                for turn in turns
            ],
        }


def recorded_episode(record: Record) -> Episode:
    """The episode of a record that was read from a file."""
    turns = (
        Turn(
            spans=tuple(Span(*span) for span in turn["spans"]),
            **{name: turn[name] for name in _TURN_FIELDS},
            images=turn.get(IMAGES),
        )
        for turn in record["turns"]
    )
    return Episode(tuple(record["key"]), tuple(turns), **{name: record[name] for name in ("prompt_ids", *_OBJECTS)})


def as_json(value: Any) -> Any:
    """The value after it has been written and read."""
    return json.loads(json.dumps(value, default=plain))


def _turns(rows: Batch, row: int, prompt_ids: list[int] | None = None) -> list[Turn]:
    length, images = int(rows["response_lengths"][row]), rows.objects[IMAGES][row] if IMAGES in rows else None
    columns = (rows[name][row, :length].tolist() for name in _COLUMNS)
    return turns_of(*columns, prompt_ids=prompt_ids, images=images)
