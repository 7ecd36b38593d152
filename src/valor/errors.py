"""How a command ends early: its text is printed as one line."""

import signal
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in what was asked for: its message is one clear line that says what to do about it. Exit code 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on in a sensible way: the message is the reason and what to do. Exit code 1."""


class StepRefused(TrainingStopped):
    """The step cannot be done, and nothing has been learnt from it yet: the run is saved as it was before."""


class WorkersReplaced(TrainingStopped):
    """Processes died and others have taken their place, which have not been sent any weights yet."""


class Interrupted(KeyboardInterrupt):
    """A signal, whose number is the argument, that stops a run at once. Exit code 128 + that number."""


def exit_code(command: Callable[[], int]) -> int:
    """Run a command; its exit code, or that of its early end, whose line has gone to stderr."""
    try:
        return command()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except TrainingStopped as reason:
        print(f"stopped: {reason}", file=sys.stderr)
        return 1
    except Interrupted as interrupt:
        name = signal.Signals(interrupt.args[0]).name
        print(f"{name}: stopped at once; the same command goes on from its last checkpoint", file=sys.stderr)
        return 128 + interrupt.args[0]
    except KeyboardInterrupt:
        print("SIGINT: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
