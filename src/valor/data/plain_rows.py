"""Rows of questions and answers under their usual names, as rows in the columns of prompt files."""

from collections.abc import Collection, Mapping
from typing import Any

from valor.data.messages import ROW_OPTIONS, as_messages
from valor.errors import UserError

QUESTIONS = ("prompt", "question", "problem")
TRUTHS = ("ground_truth", "answer", "solution")
"""Usual names of the columns of prompts, and of ground truths."""
_ROW_COLUMNS = ("prompt", "data_source", "reward_model", "agent_name", "extra_info", "ability", "ground_truth")


def is_plain(columns: Collection[str], prompt_key: str, source_key: str) -> bool:
    """Whether rows with these columns are questions, with or without answers, rather than in those of prompt files."""
    asks = any(name in columns for name in _questions(prompt_key))
    return asks and "reward_model" not in columns and (source_key not in columns or bool({*TRUTHS} & {*columns}))


def read_plain(row: Mapping[str, Any], prompt_key: str = "prompt", source_key: str = "data_source") -> dict[str, Any]:
    """A row with a `prompt`, `question` or `problem` (text or messages) and any other columns, as prompt files have it.

    Text is a user's message; messages without one of the system stand behind the text of `system`. Other columns go
    into `extra_info`; `ground_truth`, `answer` or `solution` is also the ground truth. The data source is "own" by
    default. UserError: there is no prompt.
    """
    key = prompt_column(row, prompt_key)
    source = row.get(source_key)
    truth = next((row[name] for name in TRUTHS if row.get(name) is not None), None)
    info = {name: value for name, value in row.items() if name not in (*_ROW_COLUMNS, key, source_key)}
    extra = row.get("extra_info") or {}
    return {
        prompt_key: as_messages(row[key], system=row.get("system")),
        source_key: "own" if source is None else source,
        "reward_model": row.get("reward_model") or {"style": "rule", "ground_truth": truth},
        **{name: row.get(name) for name in ("agent_name", *ROW_OPTIONS)},
        "extra_info": {**info, **extra} if isinstance(extra, Mapping) else extra,  # which parse_row refuses
    }


def prompt_column(row: Mapping[str, Any], prompt_key: str = "prompt") -> str:
    """The column that holds the row's prompt. UserError: there is none."""
    key = next((name for name in _questions(prompt_key) if name in row), None)
    if key is None:
        raise UserError(
            f"a row has no '{prompt_key}' (it has {', '.join(map(str, row))}): rename the column that holds it"
        )
    return key


def _questions(prompt_key: str) -> Collection[str]:
    """Where a prompt may be: under its usual names, or under the one that was set."""
    return QUESTIONS if prompt_key == QUESTIONS[0] else (prompt_key,)
