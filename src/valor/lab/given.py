"""Objects of a Python call as files of the run: rows, models, reward functions."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valor.config import DataConfig, SFTDataConfig
from valor.data.images import COLUMNS, parse_images
from valor.data.messages import as_messages, check_text, drop_nulls
from valor.data.plain_rows import prompt_column, read_plain
from valor.errors import UserError
from valor.rewards.functions import PROMPT

Row = dict[str, Any]
_OF_TRL = {
    "train_dataset": "train_data",
    "eval_dataset": "val_data",
    "processing_class": "tokenizer",
    "reward_funcs": "reward",
    "value_model": "critic",
}
_ANSWERS = {
    "args": "give the settings of TRL's config as keywords: learning_rate=…, num_generations=…",
    "ref_model": "the reference is the policy as it was loaded: leave it out",
    "callbacks": "take the steps one by one: for step in valor.PPO(…)",
}
_URI = "data:image/*;base64,"
_OF_ADAPTERS = {"r": "lora_rank"} | {key: key for key in ("lora_alpha", "target_modules", "exclude_modules")}
_ABOUT_ADAPTERS = {"task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}


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
            aside = target.with_name(f"{self.name}.partial")  # what an interrupt leaves is not taken for the whole
            self.write(aside)
            aside.rename(target)
        return target


def file_of_bytes(stem: str, suffix: str, content: bytes) -> InputFile:
    """A file with this content."""
    name = f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    return InputFile(name, lambda target: target.write_bytes(content))


def of_trl(arguments: Mapping[str, Any], model_key: str) -> Row:
    """The arguments of a call with TRL's names as those here; `peft_config` as keys of the model at `model_key`.

    UserError: an argument has no counterpart, with what to do, or is there under both names.
    """
    for name in arguments.keys() & _ANSWERS.keys():
        raise UserError(f"{name}: {_ANSWERS[name]}")
    renamed: Row = {}
    for name, value in arguments.items():
        if (new := _OF_TRL.get(name, name)) in renamed:
            raise UserError(f"{name}: {new} is the same argument: give one of them")
        renamed[new] = value
    adapters = renamed.pop("peft_config", None)
    if adapters is None:
        return renamed
    changed = {name for name, value in vars(adapters).items() if value != getattr(type(adapters)(), name, None)}
    if refused := sorted(changed - _OF_ADAPTERS.keys() - _ABOUT_ADAPTERS):
        raise UserError(f"peft_config: adapters here have no {', '.join(refused)}: leave it out")
    values = {f"{model_key}.{key}": getattr(adapters, name, None) for name, key in _OF_ADAPTERS.items()}
    return {key: sorted(some) if isinstance(some, set) else some for key, some in values.items() if some} | renamed


def model_settings(key: str, model: Any, tokenizer: Any = None, *, reads_text: bool = False) -> dict[str, Any]:
    """Settings below `key` for a path, a hub name, or a loaded model, which becomes a Hugging Face directory.

    UserError: it is none of them, has adapters, or has no tokenizer although the run `reads_text`.
    """
    settings, digest = dict[str, Any](), hashlib.sha256()
    if isinstance(tokenizer, str | Path):
        settings[f"{key}.tokenizer_path"] = tokenizer
    elif tokenizer is not None:
        digest.update(_known_by(tokenizer))
        if model is None or isinstance(model, str | Path):
            name = f"tokenizer-{digest.hexdigest()[:12]}"
            settings[f"{key}.tokenizer_path"] = InputFile(name, tokenizer.save_pretrained)
    if model is None:
        return settings
    if isinstance(model, str | Path):
        return {f"{key}.path": model} | settings
    if not hasattr(model, "save_pretrained") or not hasattr(model, "state_dict"):
        raise UserError(f"a model is a path, a hub name or a transformers model, got {type(model).__name__}")
    if hasattr(model, "peft_config"):
        raise UserError("the model has adapters: give the model below them, lora_rank and lora_adapter_path")
    import torch

    digest.update(model.config.to_json_string().encode())
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy())

    def write(target: Path) -> None:
        model.save_pretrained(target)
        if not isinstance(tokenizer, str | Path | None):
            tokenizer.save_pretrained(target)

    if tokenizer is None and reads_text:
        settings[f"{key}.tokenizer_path"] = at = getattr(model.config, "_name_or_path", "")
        if not at or (Path(at).is_absolute() and not Path(at).is_dir()):
            raise UserError("a loaded model comes with its tokenizer: give tokenizer=")
    return {f"{key}.path": InputFile(f"model-{digest.hexdigest()[:12]}", write)} | settings


def _known_by(tokenizer: Any) -> bytes:
    """What a run's tokens depend on, without the tokenizer's state of padding, which its calls change."""
    alone = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    return repr((sorted(alone.get_vocab().items()), tokenizer.chat_template, alone.special_tokens_map)).encode()


def data_files(name: str, data: Any, row_of: Callable[[Row], Row]) -> list[str] | InputFile:
    """The paths in `data`, or a jsonl file of its rows (a Hugging Face data set, a list of dicts) after `row_of`.

    UserError: it is neither, has no rows, or values that JSON does not have.
    """
    if isinstance(data, Mapping):
        raise UserError(f"{name}_data is a dict ({', '.join(map(str, data))}): give one split, or a list of rows")
    if hasattr(data, "columns"):  # of pandas, polars or Arrow
        kind = type(data).__name__
        raise UserError(
            f"{name}_data is a {kind}: give its rows as dicts, or a data set (datasets.Dataset.from_pandas)"
        )
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


def prompt_row(row: Row, data: DataConfig, *, keep_prompt: bool) -> Row:
    """A row as `plain_rows.read_plain` reads it, with its images as paths or data URIs; `keep_prompt`: its
    `extra_info` holds the prompt too, unchanged. `data` has the names of columns."""
    read = read_plain(row, data.prompt_key, data.reward_fn_key)
    if keep_prompt:
        prompt = row[column := prompt_column(row, data.prompt_key)]
        read["extra_info"] |= {PROMPT: prompt, column: prompt} | {n: row[n] for n in ("ability",) if n in row}
    for name in {*COLUMNS, data.image_key} & row.keys():
        read[name] = row[name]
        with suppress(UserError):  # a run that reads the column tells it, with the row
            images = parse_images(row[name], "")
            read[name] = [
                str(x.absolute()) if isinstance(x, Path) else _URI + base64.b64encode(x).decode() for x in images
            ]
            texts = row[name] if isinstance(row[name], list | tuple) else [row[name]]
            if not all(isinstance(x, str | None) for x in texts):  # no JSON; paths stay, as in rows of files
                del read["extra_info"][name]
    return read


def demonstration_row(row: Row, data: SFTDataConfig) -> Row:
    """A row of supervised training; `completion` (text, or the messages that end a chat) is what TRL calls it."""
    completion = row.get("completion")
    if completion is None:
        return row
    if not isinstance(completion, list | tuple):
        return row | {data.response_key: completion}
    prompt = as_messages(row[prompt_column(row, data.prompt_key)], system=row.get("system"))
    before = ({**m, "loss_mask": 0} if m.get("role") == "assistant" else m for m in prompt)
    return row | {data.messages_key: [*before, *completion]}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of NumPy or torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
