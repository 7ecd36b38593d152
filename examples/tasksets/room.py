"""Shell commands without a network, and with few files: some folders of their own to write to, the rest for reading.

Linux's user, mount, process and network namespaces, by `unshare` of util-linux. Of the machine only Python and the
system's programs and libraries are there, for reading. What separates is the kernel's namespaces alone: no second
kernel, no limit on CPU time or disk but the time of a command.
"""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from valor.sandbox import SandboxError

_MAX_OUTPUT = 2**20  # bytes
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child")
# $1: an empty folder for the new root, which no command ever sees from outside; $2: the folder to be in; $3: MiB of
# memory; $4: the command; then triples of ro or rw, what is here, and where it will be.
_ENTER = """
set -eu
root=$1 folder=$2 memory=$3 command=$4
shift 4
mount -t tmpfs -o size=64m none "$root"
while [ $# -gt 0 ]; do
    mode=$1 here=$2 there=$root$3
    shift 3
    mkdir -p "$(dirname "$there")"
    if [ -L "$here" ]; then ln -s "$(readlink "$here")" "$there"; continue; fi
    if [ -d "$here" ]; then mkdir -p "$there"; else : > "$there"; fi
    mount --bind "$here" "$there"
    [ "$mode" = rw ] || mount -o remount,bind,ro "$there"
done
mkdir -p "$root/proc" "$root/.before"
mount -t proc proc "$root/proc" 2>/dev/null || :
cd "$root"
pivot_root . .before
umount -l /.before
cd "$folder"
ulimit -v $((memory * 1024)) -c 0
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs bash -c "$command"
"""
# The system's programs and libraries, and this Python.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/nix/store")
_PYTHON = dict.fromkeys(folder for folder in (sys.base_prefix, sys.prefix) if not folder.startswith("/usr"))
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Ended(NamedTuple):
    """What a command printed, errors included, and its exit status; None: it did not end in time."""

    text: str
    status: int | None


def run_in_room(
    command: str,
    folders: Mapping[str, Path],
    *,
    seconds: float,
    memory_mb: int,
    env: Mapping[str, str] | None = None,
    read_only: Mapping[str, Path] | None = None,
) -> Ended:
    """Run a bash command in the first of `folders`: the paths there, and what they are here. `read_only`: others that
    it may read. What it writes elsewhere is gone at its end. SandboxError: it cannot be enclosed."""
    mounts = [("ro", path, path) for path in (*_SYSTEM, *_PYTHON) if Path(path).exists()]
    mounts += [("rw", path, path) for path in _DEVICES if Path(path).exists()]
    mounts += [("ro", str(here), there) for there, here in (read_only or {}).items()]
    mounts += [("rw", str(here), there) for there, here in folders.items()]
    programs = f"/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:{sys.base_prefix}/bin"
    variables = {"PATH": programs, "HOME": "/tmp", "LANG": "C.UTF-8"}
    arguments = [next(iter(folders)), str(memory_mb), command, *chain.from_iterable(mounts)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as root:
        try:
            done = subprocess.run(
                [*_UNSHARE, "bash", "-c", _ENTER, "enter", root, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**variables, **(env or {})},
                timeout=seconds,
                check=False,
            )
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        except OSError as error:
            raise SandboxError(str(error)) from None
        output.seek(0)
        return Ended(output.read(_MAX_OUTPUT).decode(errors="replace"), status)


@functools.cache
def why_no_room() -> str | None:
    """Why commands cannot be enclosed on this machine; None: they can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = run_in_room("echo $((6 * 7))", {"/app": Path(folder)}, seconds=30.0, memory_mb=512)
        except SandboxError as error:
            return str(error)
    return None if ended.text == "42\n" else ended.text.strip()[-300:] or "no answer"
