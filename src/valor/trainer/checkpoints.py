"""Checkpoints of a run on disk: complete or absent, the newest found again, the old ones cleared away.

A checkpoint is `global_step_N/` with one folder a role and `trainer.json` (everything the driver knows). It is
written as `global_step_N.partial` and renamed when all of it is on disk, so a run killed at any moment leaves either
a whole checkpoint or a partial folder that the next save removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from valor.errors import UserError

_NAME = re.compile(r"global_step_(\d+)")
_STATE_FILE = "trainer.json"


class CheckpointStore:
    """The `global_step_*` folders of one run directory.

    Args:
        run_dir: the run's folder.
        max_to_keep: how many of the newest stay (None: all). The best one stays besides these.
    """

    def __init__(self, run_dir: Path, max_to_keep: int | None = None) -> None:
        self.run_dir = run_dir
        self.max_to_keep = max_to_keep

    def path(self, step: int) -> Path:
        return self.run_dir / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending."""
        if not self.run_dir.is_dir():
            return []
        matches = [_NAME.fullmatch(p.name) for p in self.run_dir.iterdir()]
        return sorted(int(m[1]) for m in matches if m and (self.path(int(m[1])) / _STATE_FILE).exists())

    def save(self, step: int, state: dict[str, Any], write_roles: Callable[[Path], None], keep: set[int]) -> Path:
        """Write a checkpoint; `write_roles(folder)` puts the models in. Steps in `keep` outlive `max_to_keep`."""
        for leftover in self.run_dir.glob("global_step_*.partial"):
            shutil.rmtree(leftover)
        final, partial = self.path(step), self.run_dir / f"global_step_{step}.partial"
        partial.mkdir(parents=True)
        write_roles(partial)
        (partial / _STATE_FILE).write_text(json.dumps(state, indent=1))
        _flush_to_disk(partial)
        if final.exists():  # saved before and resumed from an earlier step: same step, newer run
            shutil.rmtree(final)
        partial.rename(final)
        _sync_directory(self.run_dir)
        self._remove_old(keep | {step})
        return final

    def load_state(self, folder: Path) -> dict[str, Any]:
        """The driver's part of a checkpoint. Raises UserError when `folder` is not a complete checkpoint."""
        try:
            return json.loads((folder / _STATE_FILE).read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"'{folder}' is not a Valor checkpoint (no {_STATE_FILE} in it): give a global_step_N folder"
            ) from None

    def resume_folder(self, mode: str, resume_from_path: str | None) -> Path | None:
        """Where to resume from under `trainer.resume_mode` (auto | disable | resume_path); None for a fresh start."""
        if mode == "disable":
            return None
        if mode == "resume_path":
            if not resume_from_path:
                raise UserError(
                    "trainer.resume_mode=resume_path needs trainer.resume_from_path=<a global_step_N folder>"
                )
            return Path(resume_from_path).expanduser()
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def _remove_old(self, keep: set[int]) -> None:
        if self.max_to_keep is None:
            return
        old = [s for s in self.steps() if s not in keep]
        spared = max(0, self.max_to_keep - 1)  # the one just written counts, and is in `keep`
        for step in old[: len(old) - spared]:
            shutil.rmtree(self.path(step))


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
