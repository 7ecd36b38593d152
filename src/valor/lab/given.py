"""Objects of a Python call as files of the run: rows, models, reward functions."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valor.data.messages import TEMPLATE_KWARGS, check_text, drop_nulls
from valor.errors import UserError
from valor.rewards.functions import PROMPT
from valor.tracking.rundir import write_atomically

Row = dict[str, Any]
_TRUTHS = ("ground_truth", "answer", "solution")
_ROW_COLUMNS = ("prompt", "data_source", "reward_model", "agent_name", "extra_info", "ability", "ground_truth")


@dataclass(frozen=True)
class InputFile:
    """A file (or folder) whose name is made from its content, and the function that writes it."""

    name: str
    write: Callable[[Path], Any]

    def into(self, folder: Path) -> Path:
        """Path of the file in `folder`, written unless it is there."""
        target = folder / self.name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.write(target)
        return target


def file_of_bytes(stem: str, suffix: str, content: bytes) -> InputFile:
    """A file with this content."""
    name = f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    return InputFile(name, lambda target: write_atomically(target, content))


def model_settings(key: str, model: Any, tokenizer: Any = None, *, reads_text: bool = False) -> dict[str, Any]:
    """Settings below `key` for a path, a hub name, or a loaded model, which becomes a Hugging Face directory.

    UserError: it is none of them, has adapters, or has no tokenizer although the run `reads_text`.
    """
    if model is None:
        return {}
    if isinstance(tokenizer, str | Path):
        return model_settings(key, model) | {f"{key}.tokenizer_path": tokenizer}
    if isinstance(model, str | Path):
        if tokenizer is None:
            return {f"{key}.path": model}
        content = repr((sorted(tokenizer.get_vocab().items()), tokenizer.chat_template)).encode()
        name = file_of_bytes("tokenizer", "", content).name
        return {f"{key}.path": model, f"{key}.tokenizer_path": InputFile(name, tokenizer.save_pretrained)}
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

    settings: dict[str, Any] = {f"{key}.path": InputFile(f"model-{digest.hexdigest()[:12]}", write)}
    if tokenizer is None and reads_text:
        settings[f"{key}.tokenizer_path"] = getattr(model.config, "_name_or_path", "")
        if not settings[f"{key}.tokenizer_path"]:
            raise UserError("a loaded model comes with its tokenizer: give tokenizer=")
    return settings


def data_files(name: str, data: Any, row_of: Callable[[Row], Row]) -> list[str] | InputFile:
    """The paths in `data`, or a jsonl file of its rows (a Hugging Face data set, a list of dicts) after `row_of`.

    UserError: it is neither, has no rows, or values that JSON does not have.
    """
    if isinstance(data, Mapping):
        raise UserError(f"{name}_data is a dict ({', '.join(map(str, data))}): give one split, or a list of rows")
    several = list(data) if isinstance(data, Iterable) and not isinstance(data, str) else [data]
    if not several:
        raise UserError(f"{name}_data has no rows")
    if all(isinstance(item, str | Path) for item in several):
        return list(map(str, several))
    from_arrow = type(data).__module__.partition(".")[0] == "datasets"
    lines = []
    for i, row in enumerate(several):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}_data is files, a data set or a list of dicts: item {i} is {type(row).__name__}")
        check_text(row, f"{name}_data, row {i}")
        try:
            record = row_of(drop_nulls(row) if from_arrow else dict(row))
            lines.append(json.dumps(record, ensure_ascii=False, default=_plain) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}_data, row {i}: {error}: leave that column out, or make it text") from None
    return file_of_bytes(name, ".jsonl", "".join(lines).encode())


def prompt_row(row: Row, *, keep_prompt: bool) -> Row:
    """A row with a `prompt` (text or messages) and any other columns, in the columns of verl's files.

    Text is a user's message. Other columns go into `extra_info`; `ground_truth`, `answer` or `solution` is also the
    ground truth. `data_source` is "own" by default. `keep_prompt`: `extra_info` holds the prompt too, unchanged.
    """
    messages, source = _messages(row), row.get("data_source")
    truth = next((row[name] for name in _TRUTHS if row.get(name) is not None), None)
    info = {**{name: value for name, value in row.items() if name not in _ROW_COLUMNS}, **(row.get("extra_info") or {})}
    return {
        "prompt": messages,
        "data_source": "own" if source is None else source,
        "reward_model": row.get("reward_model") or {"style": "rule", "ground_truth": truth},
        **{name: row.get(name) for name in ("agent_name", "tools", TEMPLATE_KWARGS)},
        "extra_info": {**info, PROMPT: row["prompt"]} if keep_prompt else info,
    }


def demonstration_row(row: Row) -> Row:
    """A row of supervised training; `completion` (text, or the messages that end a chat) is what TRL calls it."""
    completion = row.get("completion")
    if isinstance(completion, str):
        return row | {"response": completion}
    if completion is None:
        return row
    before = ({**m, "loss_mask": 0} if m.get("role") == "assistant" else m for m in _messages(row))
    return row | {"messages": [*before, *completion]}


def _messages(row: Row) -> Any:
    """The row's prompt as messages; text is a user's message."""
    if "prompt" not in row:
        raise UserError(f"a row has no 'prompt' (it has {', '.join(map(str, row))}): rename the column that holds it")
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of NumPy or torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
