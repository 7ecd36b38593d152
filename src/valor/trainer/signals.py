"""SIGINT, SIGTERM and SIGHUP ask the run to stop after the present step; a second one stops it within the step."""

import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from valor.errors import Interrupted


class StopRequest:
    """Context manager; `signum` is the signal that asked to stop, or None.

    With `at_once` (while there is no step to finish yet), and at the second signal, Interrupted is raised in the main
    thread. A signal that the process was started to ignore (SIGHUP under nohup) stays ignored. Outside the main thread
    (where Python refuses signal handlers) no request is ever reported.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.signum: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        with suppress(ValueError):  # not in the main thread
            for s in self._SIGNALS:
                if signal.getsignal(s) is not signal.SIG_IGN:
                    self._previous[s] = signal.signal(s, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.at_once or self.signum is not None:
            raise Interrupted(signum)
        self.signum = signum
        print(f"\n{signal.Signals(signum).name}: finishing this step and saving; once more to stop at once", flush=True)
