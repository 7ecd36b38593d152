"""How strongly this machine can enclose code, from the strongest way to the weakest, and which one is in use."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator

from valor.arguments import command
from valor.sandbox.box import Limits, Sandbox, SandboxError

_TRIAL_SECONDS = 60.0

LEVELS = {
    "landlock": "the kernel refuses to open any file but Python and the system's libraries; seccomp refuses sockets, "
    "processes and signals to others; nothing can be written",
    "seccomp": "the kernel refuses sockets, processes, signals to others and all writing; what this user can read, "
    "the code can read",
    "rlimits": "limits of the system, the rest is refused by Python itself: it stops accidents and common tricks, not "
    "an expert",
}


@functools.cache
def strongest_level() -> str:
    """The name of the first level that works here. Raises SandboxError when none does."""
    failures = []
    for level, failure in try_levels():
        if failure is None:
            return level
        failures.append(f"{level}: {failure}")
    raise SandboxError(f"code cannot be run safely on this machine ({'; '.join(failures)})")


def try_levels() -> Iterator[tuple[str, str | None]]:
    """Each level, strongest first, and why it does not work here (None: it does)."""
    for level in LEVELS:
        yield level, _failure(level)


@command("rewards sandbox", "valor rewards sandbox", "sandbox")
def main() -> int:
    """Say how this machine encloses code of models: all levels, and the one in use."""
    in_use = None
    for level, failure in try_levels():
        in_use = in_use or (level if failure is None else None)
        state = f"not here: {failure}" if failure else "in use" if level == in_use else "works here"
        print(f"{level:<12}{state}\n            {LEVELS[level]}")
    return 0 if in_use else 1


def _failure(level: str) -> str | None:
    if sys.platform != "linux" and level != "rlimits":
        return "needs Linux"
    try:
        with Sandbox(level, Limits(wall_seconds=_TRIAL_SECONDS)) as sandbox:
            outcomes = list(sandbox.run_all("print(6 * 7)", [""], time.monotonic() + _TRIAL_SECONDS))
    except (SandboxError, OSError) as error:
        return str(error)
    if not outcomes or outcomes[0].timed_out:  # that says nothing: a busy machine must not make the level weaker
        raise SandboxError(f"sandbox level {level}: a trial run did not end in time")
    return None if outcomes[0].stdout == "42\n" else f"a trial run failed ({outcomes[0].error})"
