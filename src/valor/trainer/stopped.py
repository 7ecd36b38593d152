"""How a run ends itself."""

from __future__ import annotations


class TrainingStopped(RuntimeError):
    """The run cannot go on in a sensible way: the message is the reason and what to do. Exit code 1."""
