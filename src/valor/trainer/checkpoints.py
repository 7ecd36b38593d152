"""Checkpoints of a run on disk: each complete or absent; the newest complete one is found, old ones are deleted.

A checkpoint is `global_step_N/` with one folder a role, `trainer.json` (the driver's state) and, written last and
checked before anything is read, `manifest.json` with each file's SHA-256. It is written as `global_step_N.partial` and
renamed when all of it is on disk. A checkpoint that it replaces is `global_step_N.replaced` meanwhile, and one that is
being deleted `global_step_N.removed`: a process killed at any moment leaves complete checkpoints, and names that tell
the rest apart.
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
_THREADS = 8  # hashlib releases the interpreter, so shards are hashed side by side
_SPARE_SPACE = 1.05  # times the size of weights and optimizers: small files, and blocks that are not full


class Damaged(UserError):
    """A folder that does not hold a checkpoint as it was written; the message says what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `kind`: of the run that wrote it; `state`: of its driver."""

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

    Keeps the newest `max_to_keep` (None: all). `last`: the checkpoint that this process has resumed from or written.
    """

    def __init__(self, run_dir: Path, max_to_keep: int | None = None) -> None:
        self.run_dir = run_dir
        self.max_to_keep = max_to_keep
        self.last: Checkpoint | None = None

    def path(self, step: int, mark: str = "") -> Path:
        return self.run_dir / f"global_step_{step}{mark}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, complete or damaged, ascending."""
        return sorted(checkpoints(self.run_dir))

    def save(self, kind: str, state: dict[str, Any], write_roles: Callable[[Path], None], keep: set[int]) -> Path:
        """Write a checkpoint; `write_roles(folder)` adds the models. Those of steps in `keep` are not deleted."""
        self._tidy()
        step = state["step"]
        final, partial, replaced = (self.path(step, mark) for mark in ("", ".partial", ".replaced"))
        try:
            partial.mkdir(parents=True)
            write_roles(partial)
            (partial / STATE_FILE).write_text(json.dumps(state, indent=1))
            write_manifest(partial, step=step, kind=kind)
            for path in [*partial.rglob("*"), partial]:
                _flush_to_disk(path)
        except Exception:
            with suppress(OSError):
                _remove(partial)  # on a full disk its space is needed
            raise
        if final.exists():  # saved before and resumed from an earlier step: same step, newer run
            final.rename(replaced)
        partial.rename(final)
        _flush_to_disk(self.run_dir)
        if replaced.exists():
            _remove(replaced)
        self.last = Checkpoint(final, kind, state)
        for old in self.steps()[: -self.max_to_keep] if self.max_to_keep else ():
            if old not in keep | {step}:
                _remove(self.path(old).rename(self.path(old, ".removed")))
        return final

    def find(self, mode: str, resume_from_path: str | None, say: Callable[[str], None]) -> Checkpoint | None:
        """The checkpoint to resume from under `trainer.resume_mode` (auto | disable | resume_path); None: start afresh.

        auto takes the newest complete one, and says what is wrong with newer ones. UserError: there are only damaged
        ones, or the one at `resume_from_path` is damaged.
        """
        self._tidy()
        self.last, damaged = None, list[str]()
        if mode == "resume_path":
            assert resume_from_path is not None, "held by the configuration"
            self.last = open_checkpoint(Path(resume_from_path).expanduser())
        for step in reversed(self.steps()) if mode == "auto" else ():
            try:
                checkpoint = open_checkpoint(self.path(step))
                if checkpoint.step != step:
                    raise Damaged(f"'{checkpoint.folder}' is the checkpoint of step {checkpoint.step}")
                self.last = checkpoint
                break
            except Damaged as error:
                damaged.append(str(error))
        if damaged and self.last is None:
            raise UserError(
                f"no checkpoint in '{self.run_dir}' is whole ({'; '.join(damaged)}): put a whole one there, or start "
                "afresh with trainer.resume_mode=disable"
            )
        for line in damaged:
            say(f"{line}; going on from an earlier one")
        return self.last

    def check_space(self, size: int) -> None:
        """UserError: the disk has no room for a checkpoint of `size` bytes."""
        need, free = int(size * _SPARE_SPACE), shutil.disk_usage(self.run_dir).free
        if free < need:
            raise UserError(
                f"'{self.run_dir}' has {free / 1e9:.2f} GB left and a checkpoint needs {need / 1e9:.2f} GB: make room "
                "(trainer.max_ckpt_to_keep keeps fewer) and start the same command again"
                + ("" if self.last else f"; {self.last_good}")
            )

    @property
    def last_good(self) -> str:
        """The last checkpoint, in words."""
        return f"the last good checkpoint is '{self.last.folder}'" if self.last else "there is no checkpoint yet"

    def way_on(self, resume_mode: str) -> str:
        """How a run that has ended early goes on, in words."""
        if self.last is None:
            return self.last_good
        same = resume_mode == "auto" or (resume_mode == "resume_path" and self.last.folder.parent != self.run_dir)
        command = "the same command" if same else "the same command with trainer.resume_mode=auto"
        return f"{command} goes on from '{self.last.folder}'"

    def _tidy(self) -> None:
        """Complete what a killed process has begun: the old checkpoint is back unless the new one is in its place."""
        for replaced in self.run_dir.glob("global_step_*.replaced"):
            final = replaced.with_suffix("")
            if final.exists():
                _remove(replaced)
            else:
                replaced.rename(final)
        for mark in ("partial", "removed"):
            for leftover in self.run_dir.glob(f"global_step_*.{mark}"):
                _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:  # somebody's file under our name
        path.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, *, step: int, kind: str) -> None:
    """Describe every file in `folder`, the checkpoint of a run of this `kind` after `step` steps."""
    files = {name: {"sha256": digest} for name, digest in _digests(folder, _files(folder)).items()}
    manifest = {"format": _FORMAT, "step": step, "kind": kind, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps({"manifest": manifest, "sha256": _digest_of(manifest)}, indent=1))


def verify(folder: Path, only: str = "") -> dict[str, Any]:
    """The manifest of `folder`, once the files are known to be those it describes. `only`: files below that folder.

    Damaged: there is no manifest, or a file is missing, not listed, or has other content.
    """
    manifest = read_manifest(folder)
    written = {name: facts["sha256"] for name, facts in manifest["files"].items() if name.startswith(only)}
    present = {name for name in _files(folder) if name.startswith(only)}
    faults = [f"{name} is missing" for name in written if name not in present]
    faults += [f"{name} was not written with it" for name in sorted(present - written.keys())]
    if not faults:
        try:
            digests = _digests(folder, written)
        except OSError as error:
            raise Damaged(f"'{folder}' is damaged: {error.filename} cannot be read ({error.strerror})") from error
        faults = [f"{name} has other content than was written" for name in written if digests[name] != written[name]]
    if faults:
        raise Damaged(f"'{folder}' is damaged: {faults[0]}")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        written = json.loads((folder / MANIFEST_FILE).read_bytes())
        manifest = written["manifest"]
        intact = written["sha256"] == _digest_of(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(
            f"'{folder}' is not a Valor checkpoint (no {MANIFEST_FILE} in it): give a whole global_step_N folder"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        intact, manifest = False, {}
    if not intact:
        raise Damaged(f"'{folder}' is damaged: {MANIFEST_FILE} is not as it was written")
    if manifest["format"] != _FORMAT:
        raise Damaged(f"'{folder}' has checkpoint format {manifest['format']}; this version of Valor reads {_FORMAT}")
    return manifest


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[str]:
    """All files below `folder` but the manifest and hidden ones, which file browsers and network file systems leave."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST_FILE)


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: file_sha256(folder / name), names), strict=True))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
