"""How a command ends early: its text is printed as one line."""


class UserError(Exception):
    """A mistake in what was asked for: its message is one clear line that says what to do about it. Exit code 2."""


class TrainingStopped(RuntimeError):
    """The run cannot go on in a sensible way: the message is the reason and what to do. Exit code 1."""


class Diverged(TrainingStopped):
    """The weights are lost to training: they are not finite, have exploded, or get no update any more."""


class WorkerDied(TrainingStopped):
    """A process that holds weights has ended; a new one can go on from the last checkpoint."""
