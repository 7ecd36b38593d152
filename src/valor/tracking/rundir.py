"""The run folder: where its records lie, whose it is, and how they are taken back to an earlier step on a resume.

config.yaml              the resolved configuration
metrics.jsonl            one line a step: {"step": 3, "critic/score/mean": 0.5, …}; null for a non-finite value
samples/step_3.jsonl     sample generations of training; samples/val_step_3.jsonl of validation
run.json                 facts about the run (name, command, versions, …)
tensorboard/, wandb/     what those loggers write
global_step_3/           checkpoints
previous/1/ …            what a run has left behind: all records and checkpoints, where it was started afresh in the
                         same folder; the checkpoints of later steps, where it went on from an earlier one
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
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how libraries written in Rust say it
_REMEDIES = {
    "make room there and start the same command again: it goes on from the last checkpoint": "ENOSPC EDQUOT EFBIG",
    "make it writable, or choose another folder (of a run: trainer.default_local_dir)": "EROFS EACCES EPERM",
    "move it away, or choose another folder (of a run: trainer.default_local_dir)": "ENOTDIR EISDIR EEXIST ENOTEMPTY",
    "correct the path, or choose another folder (of a run: trainer.default_local_dir)": "ENOENT ENAMETOOLONG ELOOP",
    "look at the disk, and start the same command again": "EIO ESTALE",
}
_REMEDY_OF = {getattr(errno, name): remedy for remedy, names in _REMEDIES.items() for name in names.split()}
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def locked(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The folder (made if missing) is this process's inside the block. UserError: another process has it.

    The lock is a record lock of POSIX: it ends with the process however that ends, a forked child does not keep it,
    and network file systems carry it to other machines. Where a file system has no locks, a line says so. A folder that
    was made here and is still empty goes away again.
    """
    new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    try:
        handle = _acquire(path, say)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)
    finally:
        if new:
            with suppress(OSError):  # it has something in it
                run_dir.rmdir()


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. UserError: it is not valid, and where."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{place}: not valid yaml ({getattr(error, 'problem', None) or error})") from None


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the file system refuses inside the block is a UserError: the path (else `path`), why, and the remedy."""
    try:
        yield
    except (UserError, TrainingStopped):
        raise
    except Exception as error:
        said = _OS_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else said and int(said[1])
        if number is None or number not in _REMEDY_OF:
            raise
        where = (isinstance(error, OSError) and error.filename) or path
        raise UserError(f"'{where}': {os.strerror(number)}: {_REMEDY_OF[number]}") from error


def samples_file(run_dir: Path, step: int, split: str = "train") -> Path:
    """Where the sample generations of `step` lie; split is "train" or "val"."""
    return run_dir / SAMPLES_DIR / f"{'val_' if split == 'val' else ''}step_{step}.jsonl"


def step_of_samples(path: Path) -> int | None:
    """The step that a samples file is about; None if its name is not one of ours."""
    match = _SAMPLES_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """What is called `global_step_N` in the folder, by N."""
    matches = [_CHECKPOINT_NAME.fullmatch(path.name) for path in run_dir.glob("global_step_*")]
    return {int(match[1]): run_dir / match[0] for match in matches if match}


def rewind(run_dir: Path, step: int | None) -> None:
    """Make the folder say nothing about steps after `step`; None: a new run, older records move to `previous/`.

    Checkpoints of later steps, of a branch that is given up or damaged, move there too: a later resume would take them
    for the newest. A line of metrics that a killed process left unfinished goes. UserError: a line before it is none.
    """
    later = [path for saved_at, path in checkpoints(run_dir).items() if step is None or saved_at > step]
    if step is None:
        names = (METRICS_FILE, SAMPLES_DIR, TENSORBOARD_DIR)
        later += [run_dir / name for name in names if (run_dir / name).exists()]
    if later:
        earlier = run_dir / "previous"
        numbers = [int(path.name) for path in earlier.glob("*") if path.name.isdigit()]
        place = earlier / str(1 + max(numbers, default=0))
        place.mkdir(parents=True)
        for path in later:
            path.rename(place / path.name)
    if step is None:
        return
    metrics = run_dir / METRICS_FILE
    if metrics.exists():
        lines = metrics.read_bytes().splitlines(keepends=True)
        steps = [_step_of_line(line) for line in lines]
        if None in steps[:-1]:
            number = steps.index(None) + 1
            raise UserError(f"'{metrics}': line {number} is no line of metrics: repair it, or move the file away")
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        write_atomically(metrics, b"".join(kept).decode())
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
    """Write beside and rename: whoever opens `path` finds the old content or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _acquire(path: Path, say: Callable[[str], None]) -> int:
    """The open file that holds the lock, with this process's number and host in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                say(f"the file system of '{path.parent}' has no locks: see to it that no other run uses this folder")
            else:
                holder = os.read(handle, 1000).decode(errors="replace") or "a process that has just begun"
                os.close(handle)
                if error.errno not in _HELD:
                    raise
                raise UserError(
                    f"'{path.parent}' is the folder of a run that is going on ({holder}): wait for its end, stop it, "
                    "or choose another folder with trainer.default_local_dir"
                ) from None
        with suppress(FileNotFoundError):  # the run that has just ended took this file with it
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        os.close(handle)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _step_of_line(line: bytes) -> int | None:
    """The step of a metrics line; None of an unfinished one, or of none."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
