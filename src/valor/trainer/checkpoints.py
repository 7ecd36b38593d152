"""Checkpoints of a run on disk: whole or absent, the newest whole one found again, the old ones cleared away.

A checkpoint is `global_step_N/` with one folder a role, `trainer.json` (everything the driver knows) and, written last
and checked before anything is read, `manifest.json`: each file's size and SHA-256. It is written as
`global_step_N.partial` and renamed when all of it is on disk. One that it replaces waits as `global_step_N.replaced`
meanwhile, and one that is deleted is called `global_step_N.removed` first, so that a process killed at any moment
leaves whole checkpoints, and names that say what else is there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valor.errors import UserError
from valor.tracking.rundir import checkpoints

STATE_FILE = "trainer.json"
MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_THREADS = 8  # hashlib lets go of the interpreter, so shards are hashed side by side
_SPARE_SPACE = 1.05  # of what the weights and optimizers take: small files, and blocks that are not full


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. `kind`: of the run that wrote it; `state`: what its driver knew."""

    folder: Path
    kind: str
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Damaged: it is not as it was written."""
    manifest = verify(folder)
    state = json.loads((folder / STATE_FILE).read_bytes())
    if state["step"] != manifest["step"]:
        raise Damaged(f"'{folder}' is damaged: {STATE_FILE} is of step {state['step']}, not of {manifest['step']}")
    return Checkpoint(folder, manifest["kind"], state)


class CheckpointStore:
    """The `global_step_*` folders of one run directory, which no other process writes to (`tracking.rundir.locked`).
    The newest `max_to_keep` stay (None: all), and the best one."""

    def __init__(self, run_dir: Path, max_to_keep: int | None = None) -> None:
        self.run_dir = run_dir
        self.max_to_keep = max_to_keep
        self.last: Checkpoint | None = None  # that this process has resumed from or written

    def path(self, step: int) -> Path:
        return self.run_dir / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, whole or damaged, ascending."""
        return sorted(checkpoints(self.run_dir))

    def save(self, kind: str, state: dict[str, Any], write_roles: Callable[[Path], None], keep: set[int]) -> Path:
        """Write a checkpoint; `write_roles(folder)` puts the models in. Steps in `keep` outlive `max_to_keep`."""
        self._tidy()
        step = state["step"]
        final, partial, aside = self.path(step), self._marked(step, "partial"), self._marked(step, "replaced")
        try:
            partial.mkdir(parents=True)
            write_roles(partial)
            (partial / STATE_FILE).write_text(json.dumps(state, indent=1))
            write_manifest(partial, step=step, kind=kind)
            _flush_to_disk(partial)
        except Exception:
            with suppress(OSError):
                _remove(partial)  # on a full disk its space is needed
            raise
        if final.exists():  # saved before and resumed from an earlier step: same step, newer run
            final.rename(aside)
        partial.rename(final)
        _sync_directory(self.run_dir)
        if aside.exists():
            _remove(aside)
        self.last = Checkpoint(final, kind, state)
        self._remove_old(keep | {step})
        return final

    def find(self, mode: str, resume_from_path: str | None, say: Callable[[str], None]) -> Checkpoint | None:
        """What to resume from under `trainer.resume_mode` (auto | disable | resume_path); None for a fresh start.

        auto takes the newest whole one, and says what is wrong with newer ones. UserError: there are only damaged ones,
        or the one at `resume_from_path` is damaged.
        """
        self._tidy()
        found, damaged = None, list[str]()
        if mode == "resume_path":
            assert resume_from_path is not None, "held by the configuration"
            found = open_checkpoint(Path(resume_from_path).expanduser())
        for step in reversed(self.steps()) if mode == "auto" else ():
            try:
                found = open_checkpoint(self.path(step))
                if found.step == step:
                    break
                damaged.append(f"'{found.folder}' is the checkpoint of step {found.step}")
            except Damaged as error:
                damaged.append(str(error))
            found = None
        if damaged and found is None:
            raise UserError(
                f"no checkpoint in '{self.run_dir}' is whole ({'; '.join(damaged)}): put a whole one there, or start "
                "afresh with trainer.resume_mode=disable"
            )
        for line in damaged:
            say(f"{line}; going on from an earlier one")
        self.last = found
        return found

    def check_space(self, size: int) -> None:
        """UserError where a checkpoint of `size` bytes would not fit beside what is there."""
        need, free = int(size * _SPARE_SPACE), shutil.disk_usage(self.run_dir).free
        if free < need:
            raise UserError(
                f"'{self.run_dir}' has {free / 1e9:.2f} GB left and a checkpoint needs {need / 1e9:.2f} GB: make room "
                "(trainer.max_ckpt_to_keep keeps fewer) and start the same command again"
                + ("" if self.last else f"; {self.last_good}")
            )

    @property
    def last_good(self) -> str:
        """Where the run stands on disk, in words."""
        return f"the last good checkpoint is '{self.last.folder}'" if self.last else "there is no checkpoint yet"

    def way_on(self, resume_mode: str) -> str:
        """How a run that has ended early goes on."""
        if self.last is None:
            return self.last_good
        same = resume_mode == "auto" or (resume_mode == "resume_path" and self.last.folder.parent != self.run_dir)
        command = "the same command" if same else "the same command with trainer.resume_mode=auto"
        return f"{command} goes on from '{self.last.folder}'"

    def _marked(self, step: int, mark: str) -> Path:
        return self.run_dir / f"global_step_{step}.{mark}"

    def _tidy(self) -> None:
        """End what a killed process has begun: the old checkpoint is back unless the new one is in its place."""
        for aside in self.run_dir.glob("global_step_*.replaced"):
            final = aside.with_suffix("")
            if final.exists():
                _remove(aside)
            else:
                aside.rename(final)
        for mark in ("partial", "removed"):
            for leftover in self.run_dir.glob(f"global_step_*.{mark}"):
                _remove(leftover)

    def _remove_old(self, keep: set[int]) -> None:
        if self.max_to_keep is None:
            return
        for step in self.steps()[: -self.max_to_keep]:
            if step not in keep:
                removed = self._marked(step, "removed")
                self.path(step).rename(removed)
                _remove(removed)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:  # somebody's file under our name
        path.unlink(missing_ok=True)


def _flush_to_disk(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        else:
            _sync_directory(file)
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
