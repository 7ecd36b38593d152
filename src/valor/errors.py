"""How a command ends early: its text is printed as one line."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what was asked for: its message is one clear line that says what to do about it. Exit code 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on in a sensible way: the message is the reason and what to do. Exit code 1."""


class Diverged(TrainingStopped):
    """The weights are lost to training: they are not finite, have exploded, or get no update any more."""


class WorkerDied(TrainingStopped):
    """A process that holds weights has ended; a new one can go on from the last checkpoint."""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: `; did you mean x?`, or "" when no known one is like it.

    `cutoff`: how alike they must be, from 0 to 1.
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: torch's own error, or that of cuBLAS, NCCL or the CPU, which are RuntimeErrors."""
    texts = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and (named or any(text in str(error) for text in texts))
