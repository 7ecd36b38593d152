"""What a Python call gives as an object becomes a file of the run: rows, models, reward functions."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valor.errors import UserError
from valor.rewards.functions import PROMPT
from valor.tracking.rundir import write_atomically

Row = dict[str, Any]
_TRUTHS = ("ground_truth", "answer", "solution")
_ROW_COLUMNS = ("prompt", "data_source", "reward_model", "agent_name", "extra_info", "ability", "ground_truth")


@dataclass(frozen=True)
class Given:
    """A file (or folder) of the name that its content decides, and how it is written."""

    name: str
    write: Callable[[Path], None]

    def into(self, folder: Path) -> Path:
        """Its place in `folder`, where it is written unless it is there."""
        target = folder / self.name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.write(target)
        return target


def given_bytes(stem: str, suffix: str, content: bytes) -> Given:
    """A file with this content."""
    name = f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    return Given(name, lambda target: write_atomically(target, content))


def given_rows(stem: str, rows: Iterable[Row]) -> Given:
    """A jsonl file. UserError: a value that JSON does not have, or no row."""
    lines = []
    for i, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"{stem}_data, row {i}: {error}: leave that column out, or make it text") from None
    if not lines:
        raise UserError(f"{stem}_data has no rows")
    return given_bytes(stem, ".jsonl", "".join(lines).encode())


def given_model(model: Any, tokenizer: Any) -> Given:
    """A Hugging Face directory of a loaded model, and of its tokenizer, if that is given."""
    if not hasattr(model, "save_pretrained") or not hasattr(model, "state_dict"):
        raise UserError(f"a model is a path, a hub name or a transformers model, got {type(model).__name__}")
    if hasattr(model, "peft_config"):
        raise UserError("the model has adapters: give the model below them, lora_rank and lora_adapter_path")
    import torch

    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy())

    def write(target: Path) -> None:
        aside = target.with_name(f"{target.name}.partial")
        model.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        aside.rename(target)

    return Given(f"model-{digest.hexdigest()[:12]}", write)


def files_of(data: Any) -> list[str] | None:
    """The files that `data` names; None: it holds rows."""
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, Sequence) and data and all(isinstance(one, str | Path) for one in data):
        return [str(one) for one in data]
    return None


def rows_of(data: Any, name: str) -> list[Row]:
    """The rows of a Hugging Face data set, or of a list of dicts. UserError: it is neither."""
    if isinstance(data, Mapping):
        raise UserError(f"{name} has several splits ({', '.join(map(str, data))}): give one of them")
    if not isinstance(data, Iterable):
        raise UserError(f"{name}: rows are files, a data set or a list of dicts, got {type(data).__name__}")
    rows = list(data)
    if wrong := [i for i, row in enumerate(rows) if not isinstance(row, Mapping)]:
        raise UserError(f"{name}, row {wrong[0]}: a row is a dict, got {type(rows[wrong[0]]).__name__}")
    return [dict(row) for row in rows]


def prompt_row(row: Row, *, keep_prompt: bool) -> Row:
    """A row with a `prompt` (text or messages) and any columns as one of the files that runs read.

    Text is what a user says. The columns go into `extra_info`; `ground_truth`, `answer` or `solution` is also the
    ground truth. A row without a `data_source` has "own". `keep_prompt`: as it was given, in `extra_info` too.
    """
    if "prompt" not in row:
        raise UserError(f"a row has no 'prompt' (it has {', '.join(map(str, row))}): rename the column that is it")
    prompt, source = row["prompt"], row.get("data_source")
    truth = next((row[name] for name in _TRUTHS if row.get(name) is not None), None)
    info = {**{name: value for name, value in row.items() if name not in _ROW_COLUMNS}, **(row.get("extra_info") or {})}
    return {
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "data_source": "own" if source is None else source,
        "reward_model": row.get("reward_model") or {"style": "rule", "ground_truth": truth},
        "agent_name": row.get("agent_name"),
        "extra_info": {**info, PROMPT: prompt} if keep_prompt else info,
    }


def demonstration_row(row: Row) -> Row:
    """A row of supervised training; `completion` (text, or the messages that end a chat) is what TRL calls it."""
    completion = row.get("completion")
    if completion is None:
        return row
    if isinstance(completion, str):
        return {**row, "response": completion}
    return {**row, "messages": [*row["prompt"], *completion]}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of NumPy or torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
