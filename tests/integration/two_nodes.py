"""Two nodes on one machine: network namespaces with their own addresses, or the loopback where there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forked import VALOR, Forked, Forks

_SPACES = ("valor-a", "valor-b")
_HOSTS = ("10.231.77.1", "10.231.77.2")


# In the process of a node: a process group of its own, and the network of a namespace.
_ENTER = """
import ctypes, os, sys
os.setsid()
if (space := sys.argv.pop(1)):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(f"/run/netns/{space}", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), "setns")
sys.stdout.reconfigure(line_buffering=True)
"""


@dataclass(frozen=True)
class Node:
    """Where a command runs: its address, and the network namespace that has it, if it has one of its own."""

    address: str
    space: str = ""

    def start(self, forks: Forks, arguments: list[str], log: Path) -> Forked:
        """`valor ppo` here, as the leader of a process group of its own."""
        return forks.start(_ENTER + VALOR, self.space, "ppo", *arguments, log=log)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Node 0 and node 1."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not _make_spaces():
        yield Node("127.0.0.1"), Node("127.0.0.1")
        return
    try:
        first, second = map(Node, _HOSTS, _SPACES)
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
