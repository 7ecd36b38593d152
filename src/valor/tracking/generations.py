"""Sample generations with the algorithm's numbers for each token: `samples/step_N.jsonl`, one JSON object a line."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from valor.tracking.rundir import samples_file, write_atomically

Split = Literal["train", "val"]
_MEASURED = ("advantages", "values", "log_probs", "returns", "teacher_log_probs")
_TORN = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come
_MAX_WINDOW = 256  # tokens; bytes that never become a character are given up after so many


@dataclass(frozen=True)
class Sample:
    """One prompt and one response; per-token lists have one entry per token of `tokens`, None where not measured.

    `tokens` joined is the response's text (see `token_strings`). `mask` is 0 on tokens that the policy did not
    write (tool observations).

    Of an episode also `turns` (number of each token's turn from 1; 0 on observations), and `episode`: its `calls`,
    `turn_rewards`, `outcome`, `error` (why it could not be played), and `rows` (of each row after the first its
    `prompt`, and the token `at` which it begins). Of a prompt with images `images`, a small picture as a data URI.
    """

    prompt: str
    tokens: list[str]
    reward: float
    uid: str = ""
    data_source: str = ""
    ground_truth: Any = None
    finish_reason: str = ""
    mask: list[int] | None = None
    turns: list[int] | None = None
    advantages: Sequence[float | None] | None = None
    values: Sequence[float | None] | None = None
    returns: Sequence[float | None] | None = None
    log_probs: Sequence[float | None] | None = None
    teacher_log_probs: Sequence[float | None] | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    episode: dict[str, Any] | None = None
    images: str | None = None


def write_samples(run_dir: Path, step: int, samples: Iterable[Sample], *, split: Split = "train") -> Path:
    """Write the sample generations of `step`, replacing those written before; returns the file.

    Per-token numbers keep six significant digits; non-finite ones become null.
    """
    path = samples_file(run_dir, step, split)
    write_atomically(path, "".join(json.dumps(_record(step, split, sample)) + "\n" for sample in samples))
    return path


def token_strings(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """One string per token id; joined, they read as the decoded text.

    A token is decoded behind the piece before it, because tokenizers drop or merge blanks at the start of a text. A
    character spread over several tokens (an emoji, say) stands at the last of them.
    """
    strings: list[str] = []
    start = boundary = 0  # the decoding window begins one piece before the last place where a character ended
    shown = 0  # characters of the window's text that earlier tokens have
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[start:end]))
        torn = text.endswith(_TORN) and end < len(ids) and end - start < _MAX_WINDOW
        complete = text.rstrip(_TORN) if torn else text
        strings.append(complete[shown:])
        shown = max(shown, len(complete))
        if not torn:
            start, boundary = boundary, end
            shown = len(decode(list(ids[start:end])))
    return strings


def _record(step: int, split: str, sample: Sample) -> dict[str, Any]:
    facts = {"step": step, "split": split, **asdict(sample)}
    for name in ("images", "teacher_log_probs"):
        if facts[name] is None:
            del facts[name]
    record = to_jsonable_python(facts, inf_nan_mode="null", fallback=plain)
    for name in facts.keys() & set(_MEASURED):
        record[name] = record[name] and [None if number is None else float(f"{number:.6g}") for number in record[name]]
    return record


def plain(value: Any) -> Any:
    """Of NumPy and torch the numbers, of other objects their text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
