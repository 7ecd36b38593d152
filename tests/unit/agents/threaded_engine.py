"""An engine for tests of episodes: it takes requests from a source as real ones do, and computes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue

from valor.rollout.base import Output, Request, RequestSource, RolloutEngine, Span


def echo(request: Request) -> Output:
    """One token: the last number of the request's seed."""
    return Output(request.request_id, [request.seed[-1]], [-0.5], "stop", (Span(1, 0),))


class ThreadedEngine(RolloutEngine):
    """Answers each request `seconds` later, from threads, by `answer`; `batches` are the seeds that came together."""

    weight_mode = "fixed"
    parallel_size = 1
    weights_version = weights_checksum = None

    def __init__(self, answer: Callable[[Request], Output] = echo, *, threads: int = 2, seconds: float = 0.0) -> None:
        self._answer, self._threads, self._seconds = answer, threads, seconds
        self.batches: list[list[tuple[int, ...]]] = []

    def serve(self, source: RequestSource) -> None:
        waiting: Queue[Request | None] = Queue()
        done: Queue[tuple[Request, Output | Exception]] = Queue()

        def work() -> None:
            while (request := waiting.get()) is not None:
                time.sleep(self._seconds)
                try:
                    done.put((request, self._answer(request)))
                except Exception as error:
                    done.put((request, error))

        workers = [threading.Thread(target=work) for _ in range(self._threads)]
        for worker in workers:
            worker.start()
        running = 0
        try:
            while (new := source.poll(wait=not running)) is not None or running:
                requests = [one for one in new or () if isinstance(one, Request)]  # what is aborted ends by itself
                if requests:
                    self.batches.append([request.seed for request in requests])
                for request in requests:
                    waiting.put(request)
                    running += 1
                if running:
                    request, output = done.get()
                    running -= 1
                    if isinstance(output, Exception):
                        raise output
                    assert request.on_finish is not None
                    request.on_finish(output)
        finally:
            for _ in workers:
                waiting.put(None)
            for worker in workers:
                worker.join()
