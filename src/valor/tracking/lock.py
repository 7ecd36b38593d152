"""A run folder belongs to one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from valor.errors import UserError

LOCK_FILE = ".run.lock"
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


def _acquire(path: Path, say: Callable[[str], None]) -> int:
    """The open file that holds the lock, with this process's number and host in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 1000).decode(errors="replace") or "a process that has just begun"
            if error.errno in _HELD:
                os.close(handle)
                raise UserError(
                    f"'{path.parent}' is the folder of a run that is going on ({holder}): wait for its end, stop it, "
                    "or choose another folder with trainer.default_local_dir"
                ) from None
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            say(f"the file system of '{path.parent}' has no locks: see to it that no other run uses this folder")
        if _is_at(handle, path):
            break
        os.close(handle)  # the run that has just ended took this file with it
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
