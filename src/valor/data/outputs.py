"""Sample outputs of a model, found again among the rows of a prompt file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from valor.data.duplicates import bare_questions, normalized, same_text
from valor.data.files import DataRow, read_records
from valor.errors import UserError

_RESPONSES = ("output", "outputs", "response", "responses", "completion", "tokens")
_PROMPTS = ("prompt", "input", "question", "problem")
_SCORES = ("score", "reward")


class OutputRecord(NamedTuple):
    """A response to the row with this number; its `label` (right or wrong) and score where the file has them."""

    row: int
    response: str
    label: bool | None
    score: float | None


def read_outputs(path: str | Path, rows: Sequence[DataRow]) -> tuple[list[OutputRecord], int]:
    """The outputs that belong to a row, and the number of those that belong to none.

    A record has the response (`output`, `response`, `responses` as a list, …) and either the row's number (`row`, from
    0) or its prompt (`prompt`, `input`, `question`: messages, the question, or the text that the model saw). What a run
    has generated (`samples/step_N.jsonl`) and verl's dumps are such files. Raises UserError when no output belongs to a
    row.
    """
    find = _RowFinder(rows)
    found, unmatched = [], 0
    for where, record in read_records(path):
        responses, row = _responses(record, where), find.row(record, where)
        if row is None:
            unmatched += len(responses)
            continue
        label = record.get("label") if isinstance(record.get("label"), bool) else None
        score = next((record[name] for name in _SCORES if isinstance(record.get(name), int | float)), None)
        found += [OutputRecord(row, response, label, score) for response in responses]
    if not found:
        raise UserError(
            f"{path}: none of its prompts is among the {len(rows)} rows; is it the output for another file?"
        )
    return found, unmatched


def _responses(record: Mapping[str, Any], where: str) -> list[str]:
    name = next((name for name in _RESPONSES if record.get(name) is not None), None)
    if name is None:
        raise UserError(f"{where}: has no response; its column must be named one of {', '.join(_RESPONSES)}")
    value = record[name]
    if name == "tokens":
        return ["".join(value)]
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


class _RowFinder:
    """Finds the row that a record belongs to, by its number or its prompt."""

    def __init__(self, rows: Sequence[DataRow]) -> None:
        self._bare = bare_questions([row.messages for row in rows], [row.data_source for row in rows])
        self._places = {question: i for i, question in enumerate(self._bare)}
        self._places |= {same_text(row.messages): i for i, row in enumerate(rows)}
        self._known: dict[str, int | None] = {}

    def row(self, record: Mapping[str, Any], where: str) -> int | None:
        """The row's number; None when its prompt is none of theirs."""
        number = record.get("row")
        if isinstance(number, int):
            if not 0 <= number < len(self._bare):
                raise UserError(f"{where}: row {number} is none of the {len(self._bare)} rows, counted from 0")
            return number
        prompt = next((record[name] for name in _PROMPTS if record.get(name)), None)
        if prompt is None:
            raise UserError(f"{where}: says neither its 'row' nor its prompt ({', '.join(_PROMPTS)})")
        text = normalized(prompt) if isinstance(prompt, str) else same_text(prompt)
        if text in self._places:
            return self._places[text]
        if text not in self._known:
            # A prompt as the model saw it has the chat template around the question.
            inside = (i for i, question in enumerate(self._bare) if question in text)
            self._known[text] = max(inside, key=lambda i: len(self._bare[i]), default=None)
        return self._known[text]
