"""What a resumed run has otherwise than the run so far: its settings, and the content of the files that they name."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel

from valor.config.describe import show, type_text
from valor.config.inheritance import follows
from valor.config.tree import flatten, get_at, is_open, matches, plain_keys, schema
from valor.trainer.checkpoints import file_sha256

# Settings that change what a run writes, where it works and how fast, not what it computes (but for the rounding that
# other processes and micro-batches bring). `_LENGTH` is one of them where no learning rate depends on it.
_HARMLESS = """
    trainer.project_name trainer.experiment_name trainer.default_local_dir trainer.rollout_data_dir
    trainer.validation_data_dir trainer.episode_data_dir trainer.logger trainer.log_* trainer.report
    trainer.save_freq trainer.test_freq
    trainer.val_before_train trainer.val_only trainer.max_* trainer.keep_best trainer.resume_*
    trainer.rollout_probs_diff_warn reward.max_error_ratio *.max_tool_error_ratio
    *.checkpoint.save_contents checkpoint.save_contents
    trainer.device trainer.n_gpus_per_node trainer.num_threads trainer.nnodes trainer.node_* trainer.master_*
    trainer.controller ray_kwargs.* resource_pools* *_per_gpu *offload* *.reshard_after_forward *.forward_prefetch
    global_profiler.* *.profiler.* *.fsdp_size *.tensor_model_parallel_size *.ulysses_sequence_parallel_size
    *.enable_gradient_checkpointing *.use_remove_padding *.share_prefixes *.max_num_seqs
    *.max_num_batched_tokens *.gpu_memory_utilization *.update_weights_bucket_megabytes *.weights_dir reward.num_workers
"""
_LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WHOLE_BYTES = 64 << 20  # weights up to this size are read whole
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 20, 64  # of larger ones, these blocks at even distances
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Change(NamedTuple):
    """One difference, as a line; `exact`: the run computes the same numbers in spite of it."""

    line: str
    exact: bool


def settings_of(config: BaseModel) -> dict[str, Any]:
    """The resolved configuration by dotted key."""
    return flatten(config.model_dump(mode="json"))


def digests_of(config: BaseModel) -> dict[str, str]:
    """Of each key that names files to read, a digest of what they hold; of a model on the hub its commit, where known.

    Of a folder it covers the files that lie in it. Large weight files are known by their size and blocks of them.
    """
    tree, found = config.model_dump(mode="json"), dict[str, str]()
    for key in plain_keys(type(config)):
        value = get_at(tree, key.name)
        if not value or "path" not in type_text(key) or matches(key.name, _HARMLESS.split()):
            continue
        digests = [_digest(name) for name in ([value] if isinstance(value, str) else value)]
        if all(digests):
            found[key.name] = " ".join(str(digest) for digest in digests)
    return found


def changes(
    root: type[BaseModel], before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """How `now` differs from `before`, each the `settings` and the `digests` of a run of `root`.

    A key that only follows another one is left out, and so is one that the earlier version did not have. Those that
    this version does not have are named together, and ignored.
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
        if (old == new and same_content) or (key not in settings[0] and key in schema(root)):
            continue
        if follows(root, key, settings):
            continue
        if old == new:
            yield Change(f"{key}: {show(new)} has other content", exact=False)
        elif all(contents) and same_content:
            yield Change(f"{key}: {show(old)} -> {show(new)}, the same content", exact=True)
        else:
            yield Change(f"{key}: {show(old)} -> {show(new)}", exact=_is_harmless(key, settings[1]))


def _is_harmless(key: str, settings: Mapping[str, Any]) -> bool:
    if key in _LENGTH:
        decays = any(name.endswith("lr_scheduler_type") and value != "constant" for name, value in settings.items())
        return not decays and not any(
            name.endswith("lr_warmup_steps_ratio") and value and settings[name.removesuffix("_ratio")] < 0
            for name, value in settings.items()
        )
    return matches(key, _HARMLESS.split())


def _digest(name: str) -> str | None:
    """Of a file, a folder or a model on the hub; None where nothing is known of it here."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        return _short("".join(f"{file.name} {_file_digest(file)}\n" for file in files).encode())
    if path.is_file():
        return _file_digest(path)
    config = try_to_load_from_cache(name, "config.json") if _HUB_ID.fullmatch(name) else None
    return Path(config).parent.name if isinstance(config, str) else None  # the folder is called after the commit


def _file_digest(file: Path) -> str:
    size = file.stat().st_size
    if size <= _WHOLE_BYTES or file.suffix not in _WEIGHTS:
        return file_sha256(file)[:16]
    with file.open("rb") as content:
        blocks = [str(size).encode()]
        for number in range(_NUM_BLOCKS):
            content.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            blocks.append(content.read(_BLOCK_BYTES))
    return _short(b"".join(blocks))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
