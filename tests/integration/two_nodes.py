"""Two nodes on one machine: network namespaces with their own addresses, or the loopback where there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SPACES = ("valor-a", "valor-b")
_HOSTS = ("10.231.77.1", "10.231.77.2")


@dataclass(frozen=True)
class Node:
    """Where a command runs: its address, and what is put before the command."""

    address: str
    prefix: tuple[str, ...]

    def start(self, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        """`valor ppo` here, as the leader of a process group of its own."""
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "valor", "ppo", *arguments],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Node 0 and node 1."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not _make_spaces():
        yield Node("127.0.0.1", ()), Node("127.0.0.1", ())
        return
    try:
        first, second = (
            Node(host, ("ip", "netns", "exec", space)) for host, space in zip(_HOSTS, _SPACES, strict=True)
        )
        yield first, second
    finally:
        _drop_spaces()


def _make_spaces() -> bool:
    _drop_spaces()
    a, b = _SPACES
    commands = [
        f"netns add {a}",
        f"netns add {b}",
        f"link add veth-{a} netns {a} type veth peer name veth-{b} netns {b}",
    ]
    for space, host in zip(_SPACES, _HOSTS, strict=True):
        commands += [
            f"-n {space} addr add {host}/24 dev veth-{space}",
            f"-n {space} link set veth-{space} up",
            f"-n {space} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        _drop_spaces()
        return False
    return True


def _drop_spaces() -> None:
    for space in _SPACES:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
