"""What a checkpoint consists of: each file's size and SHA-256, written last and checked before anything is read."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from valor.errors import UserError

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_THREADS = 8  # hashlib lets go of the interpreter, so shards are hashed side by side


class Damaged(UserError):
    """A folder that does not hold a checkpoint as it was written; the message says what is wrong."""


def write_manifest(folder: Path, *, step: int, kind: str) -> None:
    """Describe every file in `folder`, the checkpoint of a run of this `kind` after `step` steps."""
    names = _files(folder)
    sums = _checksums(folder, names)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sums[name]} for name in names}
    manifest = {"format": _FORMAT, "step": step, "kind": kind, "files": files}
    written = {"manifest": manifest, "sha256": _own_sum(manifest)}
    (folder / MANIFEST_FILE).write_text(json.dumps(written, indent=1))


def verify(folder: Path, only: str = "") -> dict[str, Any]:
    """The manifest of `folder`, once the files are known to be those it describes. `only`: files below that folder.

    Damaged: there is no manifest, or a file is missing, not listed, or has another size or content.
    """
    manifest = _read(folder)
    listed = {name: one for name, one in manifest["files"].items() if name.startswith(only)}
    found = {name for name in _files(folder) if name.startswith(only)}
    for name, one in listed.items():
        if name not in found:
            raise Damaged(f"'{folder}' is damaged: {name} is missing")
        size = (folder / name).stat().st_size
        if size != one["bytes"]:
            raise Damaged(f"'{folder}' is damaged: {name} has {size} bytes, {one['bytes']} were written")
    if extra := sorted(found - listed.keys()):
        raise Damaged(f"'{folder}' is damaged: {extra[0]} was not written with it")
    try:
        sums = _checksums(folder, listed)
    except OSError as error:
        raise Damaged(f"'{folder}' is damaged: {error.filename} cannot be read ({error.strerror})") from error
    for name, one in listed.items():
        if sums[name] != one["sha256"]:
            raise Damaged(f"'{folder}' is damaged: {name} has other content than was written")
    return manifest


def _read(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST_FILE
    try:
        written = json.loads(file.read_bytes())
        manifest = written["manifest"]
        whole = written["sha256"] == _own_sum(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(
            f"'{folder}' is not a Valor checkpoint (no {MANIFEST_FILE} in it): give a whole global_step_N folder"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        whole, manifest = False, {}
    if not whole:
        raise Damaged(f"'{folder}' is damaged: {MANIFEST_FILE} is not as it was written")
    if manifest["format"] != _FORMAT:
        raise Damaged(
            f"'{folder}' has checkpoint format {manifest['format']}; this version of Valor reads format {_FORMAT}"
        )
    return manifest


def _own_sum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[str]:
    """All files below `folder` but the manifest and hidden ones, which file browsers and network file systems leave."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST_FILE)


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: file_sha256(folder / name), names), strict=True))


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
