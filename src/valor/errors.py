"""How a command ends early: its text is printed as one line."""


class UserError(Exception):
    """A mistake in what was asked for: its message is one clear line that says what to do about it. Exit code 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on in a sensible way: the message is the reason and what to do. Exit code 1."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: torch's own error, or that of cuBLAS, NCCL or the CPU, which are RuntimeErrors."""
    texts = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and (named or any(text in str(error) for text in texts))
