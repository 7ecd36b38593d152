"""The run folder: its files, its lock, and how a resume takes the records back to an earlier step.

config.yaml              the resolved configuration
metrics.jsonl            one line a step: {"step": 3, "critic/score/mean": 0.5, …}; null for a non-finite value
samples/step_3.jsonl     sample generations of training; samples/val_step_3.jsonl of validation
run.json                 facts about the run (name, command, versions, …)
tensorboard/, wandb/     what those loggers write
global_step_3/           checkpoints
previous/1/ …            records and checkpoints of a run that was started afresh in the same folder; checkpoints of
                         later steps, where a run went on from an earlier one
"""

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from valor.errors import TrainingStopped, UserError

METRICS_FILE = "metrics.jsonl"
SAMPLES_DIR = "samples"
TENSORBOARD_DIR = "tensorboard"
INFO_FILE = "run.json"
LOCK_FILE = ".run.lock"
_SAMPLES_NAME = re.compile(r"(?:val_)?step_(\d+)\.jsonl")
_CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in messages of libraries written in Rust
_REMEDIES = {
    "make room there and start the same command again: it goes on from the last checkpoint": "ENOSPC EDQUOT EFBIG",
    "make it writable, move it away, or choose another folder (of a run: trainer.default_local_dir)": (
        "EROFS EACCES EPERM ENOTDIR EISDIR EEXIST ENOTEMPTY ENOENT ENAMETOOLONG ELOOP"
    ),
    "look at the disk, and start the same command again": "EIO ESTALE",
}
_locked_here: dict[str, int] = {}  # handles by folder; a process may take a record lock again that it has
_REMEDY_OF = {getattr(errno, name): remedy for remedy, names in _REMEDIES.items() for name in names.split()}


@contextmanager
def locked(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the folder, made if missing, inside the block. UserError: another run has locked it.

    The lock is a record lock of POSIX: it ends with the process, forked children do not inherit it, and network file
    systems carry it to other machines. Where a file system has no locks, a line says so. A folder that was made here
    and is still empty is removed.
    """
    resolved = os.path.realpath(run_dir)
    if resolved in _locked_here:
        raise UserError(
            f"'{run_dir}' is the folder of a run of this process that goes on: take its remaining steps or close() it, "
            "or choose another folder with trainer.default_local_dir"
        )
    is_new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    try:
        _locked_here[resolved] = _acquire(path, say)
        try:
            yield
        finally:
            handle = _locked_here.pop(resolved)
            if _is_at(path, handle):
                path.unlink()
            os.close(handle)
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                run_dir.rmdir()


def keep_locked(run_dir: Path, say: Callable[[str], None]) -> None:
    """Lock the folder anew where it was removed or moved away while it was locked here. UserError: another run has
    locked it since."""
    resolved, path = os.path.realpath(run_dir), run_dir / LOCK_FILE
    before = _locked_here.get(resolved)
    if before is not None and not _is_at(path, before):
        run_dir.mkdir(parents=True, exist_ok=True)
        _locked_here[resolved] = _acquire(path, say)
        os.close(before)
        say(f"'{run_dir}' was removed or moved away: it is made anew, and the run goes on there")


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. UserError: it is not valid, and where."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid yaml ({getattr(error, 'problem', None) or error})") from None


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the file system inside the block as a UserError: the path (else `path`), why, and the remedy."""
    try:
        yield
    except (UserError, TrainingStopped):
        raise
    except Exception as error:
        match = _OS_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else match and int(match[1])
        if number is None or number not in _REMEDY_OF:
            raise
        where = (isinstance(error, OSError) and error.filename) or path
        raise UserError(f"'{where}': {os.strerror(number)}: {_REMEDY_OF[number]}") from error


def samples_file(run_dir: Path, step: int, split: str = "train") -> Path:
    """The file of the sample generations of `step`; split is "train" or "val"."""
    return run_dir / SAMPLES_DIR / f"{'val_' if split == 'val' else ''}step_{step}.jsonl"


def step_of_samples(path: Path) -> int | None:
    """The step of a samples file; None if its name is not one of ours."""
    match = _SAMPLES_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """The folders `global_step_N` by N."""
    matches = [_CHECKPOINT_NAME.fullmatch(path.name) for path in run_dir.glob("global_step_*")]
    return {int(match[1]): run_dir / match[0] for match in matches if match}


def rewind(run_dir: Path, step: int | None) -> None:
    """Remove records of steps after `step`; None: a new run, all older records move to `previous/`.

    Checkpoints of later steps move there too: a later resume would take them for the newest. An unfinished last line
    of metrics, of a killed process, is dropped. UserError: another line is no JSON object with a step.
    """
    later = [path for saved_at, path in checkpoints(run_dir).items() if step is None or saved_at > step]
    if step is None:
        names = (METRICS_FILE, SAMPLES_DIR, TENSORBOARD_DIR)
        later += [run_dir / name for name in names if (run_dir / name).exists()]
    if later:
        numbers = [int(path.name) for path in (run_dir / "previous").glob("*") if path.name.isdigit()]
        folder = run_dir / "previous" / str(1 + max(numbers, default=0))
        folder.mkdir(parents=True)
        for path in later:
            path.rename(folder / path.name)
    if step is None:
        return
    metrics = run_dir / METRICS_FILE
    if metrics.exists():
        lines = metrics.read_bytes().splitlines(keepends=True)
        steps = [_step_of_line(line) for line in lines]
        if None in steps[:-1]:
            number = steps.index(None) + 1
            raise UserError(f"'{metrics}': line {number} is no line of metrics: repair it, or move the file away")
        earlier = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        write_atomically(metrics, b"".join(earlier).decode())
    for path in (run_dir / SAMPLES_DIR).glob("*.jsonl"):
        if (sampled_at := step_of_samples(path)) is not None and sampled_at > step:
            path.unlink()


def write_run_info(run_dir: Path, **facts: Any) -> None:
    """Merge `facts` (JSON values) into run.json."""
    write_atomically(run_dir / INFO_FILE, json.dumps({**read_run_info(run_dir), **facts}, indent=2) + "\n")


def read_run_info(run_dir: Path) -> dict[str, Any]:
    """The facts in run.json; `{}` if there is no such file."""
    path = run_dir / INFO_FILE
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise UserError(f"'{path}' is damaged ({error}): delete it, it is written anew by every start") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside and rename: readers of `path` see the old content or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)  # on a full disk its space is needed
        raise


def _acquire(path: Path, say: Callable[[str], None]) -> int:
    """The open, locked file, with this process's number and host in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = os.read(handle, 1000).decode(errors="replace") or "a process that has just begun"
                os.close(handle)
                raise UserError(
                    f"'{path.parent}' is the folder of a run that is going on ({owner}): wait for its end, stop it, "
                    "or choose another folder with trainer.default_local_dir"
                ) from None
            say(f"the file system of '{path.parent}' has no locks: see to it that no other run uses this folder")
        if _is_at(path, handle):  # a run that has just ended may have removed this file
            break
        os.close(handle)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _step_of_line(line: bytes) -> int | None:
    """The step of a metrics line; None of an unfinished one, or one without a step."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
