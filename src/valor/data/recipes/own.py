"""Your own files: which of their columns is what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from valor.data.files import Messages
from valor.data.recipes.convert import conversation
from valor.data.recipes.recipe import Example, Recipe, Record, number, value


def own_prompts(prompt: str, answer: str, data_source: str, extra: Sequence[str] = ()) -> Recipe:
    """Questions with ground truths. `prompt` names text or messages, `answer` what the grader compares with.

    A dot in a name goes into a dictionary: `reward_model.ground_truth`.
    """

    def convert(record: Record) -> Example:
        others = {name: value(record, name) for name in extra}
        return Example(_text_or_messages(record, prompt), _truth(value(record, answer)), others)

    return Recipe("custom", "your own questions", convert, data_source, "custom")


def _text_or_messages(record: Record, name: str) -> str | Messages:
    """Messages stay; transcripts of `\\n\\nHuman: …` become messages; other text is the user's question."""
    found = value(record, name)
    if isinstance(found, list):
        return found
    if not isinstance(found, str):
        raise ValueError(f"'{name}' must be text or a list of messages, got {found!r:.60}")
    return conversation(found) if found.startswith("\n\nHuman:") else found.strip()


def _truth(found: Any) -> Any:
    """Numbers as text, so that csv and parquet give the same; lists and texts as they are."""
    if isinstance(found, Mapping):
        return json.dumps(found, ensure_ascii=False)
    return found if isinstance(found, list) else number(found)
