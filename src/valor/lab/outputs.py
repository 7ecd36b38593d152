"""Sample outputs of a model, found again among the rows of a prompt file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from valor.data.files import DataRow, normalized, read_records, same_text
from valor.errors import UserError

_RESPONSES = ("output", "response", "responses", "tokens")
_PROMPTS = ("prompt", "input", "question")


_END = 60  # characters of a response that a message shows


class Output(NamedTuple):
    """A response to a row, and whether it is right, where its file says so."""

    row: DataRow
    response: str
    label: bool | None

    def __str__(self) -> str:
        return f"ground truth {self.row.ground_truth!r:.80}; the output ends {self.response.strip()[-_END:]!r}"


def read_outputs(path: str | Path, rows: Sequence[DataRow]) -> tuple[list[Output], int]:
    """The outputs that belong to a row, and the number of those that belong to none.

    A record has the response (`output`, `response`, `responses` as a list, `tokens`) and either the row's number
    (`row`, from 0) or its prompt (`prompt`, `input`, `question`): messages, or a text in which the row's last message
    stands, such as what the model saw. What a run has generated (`samples/step_N.jsonl`) and verl's dumps are such
    files. Raises UserError when no output belongs to a row.
    """
    questions = [normalized(row.messages[-1]["content"]) for row in rows]
    known: dict[str, int | None] = {}
    found, unmatched = [], 0
    for where, record in read_records(path):
        responses, row = _responses(record, where), record.get("row")
        if not isinstance(row, int):
            prompt = next((record[name] for name in _PROMPTS if record.get(name)), None)
            if prompt is None:
                raise UserError(f"{where}: says neither its 'row' nor its prompt ({', '.join(_PROMPTS)})")
            text = normalized(prompt) if isinstance(prompt, str) else same_text(prompt)
            if text not in known:
                known[text] = _longest_inside(text, questions)
            row = known[text]
        elif not 0 <= row < len(rows):
            raise UserError(f"{where}: row {row} is none of the {len(rows)} rows, counted from 0")
        if row is None:
            unmatched += len(responses)
            continue
        label = record.get("label") if isinstance(record.get("label"), bool) else None
        found += [Output(rows[row], response, label) for response in responses]
    if not found:
        raise UserError(
            f"{path}: none of its prompts is among the {len(rows)} rows; is it the output for another file?"
        )
    return found, unmatched


def _longest_inside(prompt: str, questions: Sequence[str]) -> int | None:
    inside = (i for i, question in enumerate(questions) if question in prompt)
    return max(inside, key=lambda i: len(questions[i]), default=None)


def _responses(record: Mapping[str, Any], where: str) -> list[str]:
    name = next((name for name in _RESPONSES if record.get(name) is not None), None)
    if name is None:
        raise UserError(f"{where}: has no response; its column must be named one of {', '.join(_RESPONSES)}")
    found = record[name]
    if name == "tokens":
        return ["".join(found)]
    return [str(one) for one in found] if isinstance(found, list) else [str(found)]
