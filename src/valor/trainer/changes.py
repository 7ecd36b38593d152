"""Differences between a resumed run and the checkpoint's: settings, and the content of the files they name."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel

from valor.config.describe import show, type_text
from valor.config.inheritance import follows
from valor.config.tree import flatten, get_at, is_open, matches, plain_keys, schema
from valor.trainer.checkpoints import file_sha256

# Settings that change what a run writes, where it works and how fast, but not what it computes (except for rounding by
# other processes and micro-batches); after `!` those that do. `_LENGTH` is one of them where no learning rate depends
# on it.
_HARMLESS = """
    trainer.* !trainer.seed !trainer.full_determinism !trainer.critic_warmup !trainer.v1.* !trainer.total_*
    reward.max_error_ratio reward.num_workers *.max_tool_error_ratio *checkpoint.save_contents ray_kwargs.*
    resource_pools* *_per_gpu *offload* *.reshard_after_forward *.forward_prefetch global_profiler.* *.profiler.*
    *.fsdp_size *.tensor_model_parallel_size *.ulysses_sequence_parallel_size *.enable_gradient_checkpointing
    *.use_remove_padding *.share_prefixes *.model.compile *.model.use_liger *.max_num_seqs
    *.max_num_batched_tokens *.gpu_memory_utilization *.update_weights_bucket_megabytes *.weights_dir data.image_cache
"""
_VALIDATES = ("data.val_", "actor_rollout_ref.rollout.val_kwargs.")
_LEARNS = (*_VALIDATES, "algorithm.", "critic.", "distillation.", "actor_rollout_ref.actor.", "trainer.total_")
_LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 20, 64  # of a larger weight file, blocks at even distances; of others all bytes
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class Change(NamedTuple):
    """One difference, as a line; `exact`: the run computes the same numbers in spite of it."""

    line: str
    exact: bool

    @property
    def of_validation(self) -> bool:
        """Whether scores of validations before and after it are not of the same kind."""
        return not self.exact and self.line.startswith((*_VALIDATES, "reward."))

    @property
    def of_samples(self) -> bool:
        """Whether the run after it would sample or grade otherwise, or other prompts."""
        return not self.exact and not self.line.startswith(_LEARNS)


def settings_of(config: BaseModel) -> dict[str, Any]:
    """The resolved configuration by dotted key."""
    return flatten(config.model_dump(mode="json"))


def digests_of(config: BaseModel) -> dict[str, str]:
    """For each key that names files to read, a digest of their content; for a model on the hub its commit, if cached.

    A folder's digest covers the files directly in it. Large weight files are sampled.
    """
    tree, digests = config.model_dump(mode="json"), dict[str, str]()
    for key in plain_keys(type(config)):
        value = get_at(tree, key.name)
        if value and "path" in type_text(key) and not matches(key.name, _HARMLESS.split()):
            parts = [_digest(name) for name in ([value] if isinstance(value, str) else value)]
            if all(parts):
                digests[key.name] = " ".join(map(str, parts))
    return digests


def changes(
    root: type[BaseModel], before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """Differences of `now` from `before`, each the `settings` and the `digests` of a run of `root`.

    Leaves out keys that only follow another one, and keys that the earlier version did not have. Keys that this version
    does not have are named together, and ignored.
    """
    settings, digests = (before["settings"], now["settings"]), (before["digests"], now["digests"])
    known = {key.name for key in plain_keys(root)}
    unknown = [key for key in settings[0] if key not in known | {*settings[1]} and not is_open(root, key)]
    if unknown:
        yield Change(f"ignored, this version has no such keys: {', '.join(unknown)}", exact=True)
    for key in [key for key in {**settings[0], **settings[1]} if key not in unknown]:
        old, new = settings[0].get(key), settings[1].get(key)
        contents = digests[0].get(key), digests[1].get(key)
        same_content = contents[0] == contents[1] if all(contents) else old == new
        is_new = key not in settings[0] and key in schema(root)
        if is_new or (old == new and same_content) or follows(root, key, settings):
            continue
        if old == new:
            yield Change(f"{key}: {show(new)} has other content", exact=False)
        elif all(contents) and same_content:
            yield Change(f"{key}: {show(old)} -> {show(new)}, the same content", exact=True)
        else:
            yield Change(f"{key}: {show(old)} -> {show(new)}", exact=_is_harmless(key, settings[1]))


def _is_harmless(key: str, settings: Mapping[str, Any]) -> bool:
    if key not in _LENGTH:
        return matches(key, _HARMLESS.split())
    if key == "trainer.total_epochs" and settings["trainer.total_training_steps"] is not None:
        return True  # which is read in its place
    return not any(
        (name.endswith("lr_scheduler_type") and value != "constant")
        or (name.endswith("lr_warmup_steps_ratio") and value and settings[name.removesuffix("_ratio")] < 0)
        for name, value in settings.items()
    )


def _digest(name: str) -> str | None:
    """Digest of a file, a folder or a model on the hub; None: there is no such thing on this machine."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        return _short("".join(f"{file.name} {_file_digest(file)}\n" for file in files).encode())
    if path.is_file():
        return _file_digest(path)
    config = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 and name[0] not in "/~." else None
    return Path(config).parent.name if isinstance(config, str) else None  # the folder is named after the commit


def _file_digest(file: Path) -> str:
    size = file.stat().st_size
    if size <= _NUM_BLOCKS * _BLOCK_BYTES or file.suffix not in _WEIGHTS:
        return file_sha256(file)[:16]
    content = [str(size).encode()]
    with file.open("rb") as weights:
        for number in range(_NUM_BLOCKS):
            weights.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            content.append(weights.read(_BLOCK_BYTES))
    return _short(b"".join(content))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
