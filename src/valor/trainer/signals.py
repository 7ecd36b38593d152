"""SIGINT, SIGTERM and SIGHUP ask the run to stop after the present step; a second one stops it within the step.

A step that is complete is saved all the same: a second one while it is being written does nothing, a third ends that.
"""

import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from valor.errors import Interrupted
from valor.tracking.console import get_console, say

# A batch system signals every process of a job, `timeout` its command and then the group: to a run that a sweep has
# started, or to the command itself, one request comes twice.
_ONE_REQUEST_SECONDS = 1.0


class StopRequest:
    """Context manager; `signum` is the signal that asked to stop, or None.

    With `at_once` (while there is no step to finish yet), at the second signal outside of `saving`, and at the third,
    Interrupted is raised in the main thread. From the first on the run does not end because nobody reads what it
    prints: Ctrl-C ends the `tee` behind it too. A signal that the process was started to ignore (SIGHUP under nohup)
    stays ignored, and one within a second of another is the same request. Outside the main thread (where Python refuses
    signal handlers) no request is ever reported.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once, self.saving = at_once, False
        self.signum: int | None = None
        self._raised: int | None = None
        self._ended = False
        self._count, self._last = 0, float("-inf")
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        with suppress(ValueError):  # not in the main thread
            for s in self._SIGNALS:
                if signal.getsignal(s) is not signal.SIG_IGN:
                    self._previous[s] = signal.signal(s, self._on_signal)
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._ended = True
        for s in (s for s in self._previous if signal.getsignal(s) == self._on_signal):
            with suppress(ValueError):  # it ends in another thread than it began in
                signal.signal(s, self._previous[s])
        if type(error) is KeyboardInterrupt:  # Ray raises it in place of any exception of a signal's handler
            self.raise_again()

    def raise_again(self) -> None:
        """Raise Interrupted once more, where a library or a callback from C has swallowed the first."""
        if self._raised is not None:
            raise Interrupted(self._raised)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._ended:  # what was there could not be put back, or was by another run that had begun within this one
            signal.signal(signum, self._previous[signal.Signals(signum)])
            return signal.raise_signal(signum)
        if time.monotonic() - self._last < _ONE_REQUEST_SECONDS:
            return
        self._count, self._last = self._count + 1, time.monotonic()
        if self.at_once or self._count > 1 + self.saving:
            self._raised = signum
            raise Interrupted(signum)
        name, get_console().may_be_unread = signal.Signals(signum).name, True
        if self._count == 1:
            self.signum = signum
            say(f"\n{name}: finishing this step and saving; once more to stop at once")
        else:
            say(f"\n{name}: saving the last complete step; once more to stop without it")
