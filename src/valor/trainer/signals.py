"""SIGINT and SIGTERM ask the run to stop after the present step; a second one stops it at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Context manager; `signum` is the signal that asked to stop, or None.

    Outside the main thread (where Python refuses signal handlers) it never reports a request.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        try:
            for s in self._SIGNALS:
                self._previous[s] = signal.signal(s, self._on_signal)
        except ValueError:  # not in the main thread
            pass
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)  # type: ignore[arg-type]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        print(f"\n{signal.Signals(signum).name}: finishing this step and saving; once more to stop at once", flush=True)
