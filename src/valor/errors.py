"""How a command ends early: its text is printed as one line."""

import difflib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from types import FrameType
from typing import TextIO


class UserError(Exception):
    """A mistake in what was asked for: its message is one clear line that says what to do about it. Exit code 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on in a sensible way: the message is the reason and what to do. Exit code 1."""


class Diverged(TrainingStopped):
    """The weights are not finite, have exploded, or get no update any more."""


class WorkerDied(TrainingStopped):
    """A process that holds weights has ended, `what` says which; a new one can go on from the last checkpoint."""

    def __init__(self, what: str) -> None:
        self.what = what
        advice = "start the same command again, on as many nodes as are left"
        super().__init__(f"{what}: {advice}")


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: `; did you mean x?`, or "" when no known one is like it.

    `cutoff`: how alike they must be, from 0 to 1.
    """
    near = difflib.get_close_matches(name, [word for word in known if word], n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: torch's own error, or that of cuBLAS, NCCL or the CPU, which are RuntimeErrors."""
    texts = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and (named or any(text in str(error) for text in texts))


class StepRefused(TrainingStopped):
    """The step cannot be done, and nothing has been learnt from it yet."""


class WorkersReplaced(TrainingStopped):
    """Processes died and others have taken their place, which have not been sent any weights yet."""


class Interrupted(KeyboardInterrupt):
    """A signal, whose number is the argument, that stops a run at once. Exit code 128 + that number."""


def _on_sigint(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt. Inside an import the process ends here: libraries swallow it and go on with half a module."""
    if any(each.f_code.co_filename.startswith("<frozen importlib") for each, _ in traceback.walk_stack(frame)):
        os.write(2, b"SIGINT: stopped\n")
        os._exit(128 + number)
    raise KeyboardInterrupt


def exit_code(command: Callable[[], int]) -> int:
    """Run a command; its exit code, or that of its early end, whose line has gone to stderr.

    After a stop by a signal SIGINT is ignored: the process is ending, and its threads and processes may take a while.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 is no reason to end a run
    in_main_thread = threading.current_thread() is threading.main_thread()
    handles = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles:
        signal.signal(signal.SIGINT, _on_sigint)
    try:
        code = command()
        sys.stdout.flush()  # else a reader that has gone is noticed at the interpreter's end
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        drop(sys.stdout)
        return 128 + signal.SIGPIPE
    except UserError as error:
        return _ended(2, str(error), error)
    except TrainingStopped as error:
        return _ended(1, f"stopped: {error}", error)
    except RuntimeError as error:
        if str(error) != "Could not determine home directory.":  # of pathlib
            raise
        return _ended(2, "a path begins with ~ and the name of no user here: ~/ is your own folder", error)
    except KeyboardInterrupt as error:
        session_goes_on = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        # Also in a nested call, whose caller has set the handler.
        if in_main_thread and signal.getsignal(signal.SIGINT) is _on_sigint and not session_goes_on:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not isinstance(error, Interrupted):
            return _ended(128 + signal.SIGINT, "SIGINT: stopped", error)
        if not hasattr(error, "__notes__"):  # before the first step
            error.add_note("the same command goes on from its last checkpoint")
        return _ended(128 + error.args[0], f"{signal.Signals(error.args[0]).name}: stopped at once", error)
    finally:
        if handles and signal.getsignal(signal.SIGINT) is _on_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _ended(code: int, line: str, error: BaseException) -> int:
    try:
        print("; ".join([line, *getattr(error, "__notes__", ())]), file=sys.stderr, flush=True)
    except BrokenPipeError:
        drop(sys.stderr)
    return code


def drop(stream: TextIO) -> None:
    """From here on nothing of what goes to `stream` is written anywhere: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
