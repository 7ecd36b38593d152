"""Files and models that a run would miss, looked for before torch is imported."""

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from valor.config import PPOConfig, SupervisedConfig, inert_settings
from valor.config.tree import flatten
from valor.data.files import existing_file
from valor.errors import UserError
from valor.hub import hub_answers, out_of_reach

_DATA = ("data.train_files", "data.val_files")
_MODELS = ("model.path", "model.tokenizer_path", "model_path", "lora_adapter_path")
_FILES = (".py", ".yaml", ".yml", ".json", ".jinja")


def missing(config: PPOConfig | SupervisedConfig) -> list[str]:
    """A line for each data file, model, and file of the user's own that the run reads, and which is not there."""
    flat = flatten(config.model_dump(mode="json"))
    read: dict[str, Any] = {key: flat[key] for key in flat.keys() - inert_settings(config, flat).keys() if flat[key]}
    own_class = read.get("data.custom_cls.path") is not None  # it reads what it likes
    lines = [_no_file(path) for key in _DATA if not own_class for path in read.get(key, ())]
    for key, value in read.items():
        if key.endswith(_MODELS):
            lines.append(_no_model(value))
        elif isinstance(value, str) and key.endswith("path") and Path(value.partition(":")[0]).suffix in _FILES:
            file = value.partition(":")[0]
            lines.append(None if Path(file).exists() else f"{file}: no such file; check {key}")
    return list(dict.fromkeys(line for line in lines if line))


def _no_file(path: str) -> str | None:
    try:
        existing_file(path)
    except UserError as error:
        return str(error)
    return None


def _no_model(path: str) -> str | None:
    if are_here(path):
        return None
    if path.startswith(("/", "~", ".")) or path.count("/") > 1:
        return f"there is no model directory '{path}'"
    return None if hub_answers() else out_of_reach(path)


def are_here(*paths: str | None) -> bool:
    """Whether each model is on this machine, as a directory or in the hub's cache. None counts."""
    return all(path is None or Path(path).expanduser().exists() or _is_cached(path) for path in paths)


def _is_cached(path: str) -> bool:
    files = ("config.json", "tokenizer_config.json") if path.count("/") < 2 and path[0] not in "/~." else ()
    return any(isinstance(try_to_load_from_cache(path, file), str) for file in files)
