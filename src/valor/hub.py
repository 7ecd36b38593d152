"""Paths of models that lead to none: the Hugging Face hub may be out of reach, a directory something else."""

import os
import sys
from functools import cache
from pathlib import Path

_SECONDS = 3.0


def out_of_reach(path: str) -> str:
    """What to do about a model at `path` that only the hub could have."""
    return (
        f"'{path}' is no local directory, it is not in the cache of the Hugging Face hub, and the hub cannot be "
        f"reached: give a directory that holds it (`hf download {path} --local-dir DIR` where there is a network), or "
        "set HF_ENDPOINT to a mirror"
    )


def instead_of_model(path: str) -> str | None:
    """What a directory without a model is, and what to do; None: it has a config.json, and looks like a model."""
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file():
        return f"'{path}' holds adapters: set model.path to their base, and model.lora_adapter_path to this directory"
    parts = [part for part in (folder, *folder.absolute().parents) if part.name.startswith("global_step_")]
    if checkpoint := next((part for part in parts if (part / "manifest.json").is_file()), None):
        return f"'{path}' is of a checkpoint: `valor export {checkpoint} OUT` makes a model of it (--role: of which)"
    models = [file.parent for depth in ("*", "*/*") for file in sorted(folder.glob(f"{depth}/config.json"))]
    hint = f": give one in it, such as '{models[0]}'" if models else ", nor a tokenizer"
    return None if (folder / "config.json").is_file() else f"'{path}' is not a model: it has no config.json{hint}"


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached; asked once. If not, this process and its children read only the hub's cache, as
    its libraries would retry each file for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of whichever HTTP library the hub's client has
        print(f"note: {constants.ENDPOINT} cannot be reached ({error}): only its cache is read", file=sys.stderr)
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
        return False
    return True
