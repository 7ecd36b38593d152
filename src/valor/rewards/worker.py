"""Samples, their results, and what makes one of the other inside a grader process: every failure is a result."""

import asyncio
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import connection, parent_process
from typing import Any, NamedTuple, Self

from valor.rewards import registry
from valor.rewards.code import configure
from valor.rewards.custom import CustomFunction
from valor.rewards.functions import one_each
from valor.rewards.steps import Step, as_steps
from valor.tracking.progress import report_progress

HEADER = struct.Struct("!Qq")  # of a reply: its bytes, the number of its job

NOT_GRADED = "not graded"  # in place of the components of a sample whose grader failed: what went wrong
_LARGEST = 3.4e38  # a score or component: of float32, in which scores are used
_MAX_TEXT = 300  # characters of an error or of a component that is neither number nor text


class Sample(NamedTuple):
    """One response to be graded: the policy's own words.

    Of an episode: `turns`, what it said in each turn (`solution_str` is all of them), and the `transcript`, with what
    tools and environments said. None of a single answer.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    turns: Sequence[str] | None = None
    transcript: str | None = None

    @classmethod
    def of_turns(cls, turns: Sequence[str] | None, transcript: str, *others: Any) -> Self:
        """`others`: data source, ground truth, extra_info."""
        source, truth, info = others
        if turns is None or list(turns) == [transcript]:
            return cls(source, transcript, truth, info)
        return cls(source, "\n".join(turns), truth, info, turns, transcript)


class RewardResult(NamedTuple):
    """One response's score, its named components (numbers, texts), what went wrong (None: nothing) and the time.

    `kind` of error: "timeout", "crash" (the process ended), "memory", "undecided" (the grader said so) or "exception".
    `steps`: what parts of the response have earned besides the score.
    """

    score: float
    components: dict[str, Any]
    error: str | None = None
    seconds: float = 0.0
    kind: str = "exception"
    steps: tuple[Step, ...] = ()

    @property
    def total(self) -> float:
        """The score and what the steps have earned."""
        return self.score + math.fsum(reward for _, reward in self.steps)

    @property
    def correct(self) -> bool:
        """Right or wrong: the grader's `acc` component when there is one, else whether the score is positive."""
        acc = self.components.get("acc")
        value = acc if isinstance(acc, bool | int | float) else self.score
        return self.error is None and value > 0

    @property
    def has_verdict(self) -> bool:
        """Whether right and wrong are known: a learned reward alone says neither."""
        return "acc" in self.components or not {"rm_score", NOT_GRADED} & {*self.components}


def gather(futures: Sequence[Future[RewardResult]]) -> list[RewardResult]:
    """The results, in order; waits for them and reports progress."""
    results = []
    for future in futures:
        results.append(future.result())
        report_progress(len(results), len(futures))
    return results


class Grading:
    """The grader of this process: the custom function, or that of each data source."""

    def __init__(self, custom: CustomFunction | None, error_score: float) -> None:
        self.error_score = error_score
        self._kwargs = dict(custom.kwargs) if custom else {}
        # One loop for the life of the process: clients that a grader keeps open belong to their loop.
        self._loop = asyncio.Runner()
        self._broken: str | None = None
        self._grader: Callable[..., Any] = registry.compute_score
        self._names = {field: field for field in ("data_source", "solution_str", "ground_truth", "extra_info", "turns")}
        try:
            if custom:
                self._grader = custom.load(stays=False)  # the process is the function's own
                self._names = custom.arguments(self._grader)
        except BaseException as error:  # raising here would end the process, and the next one, for ever
            self._broken = describe_error(error)

    def grade(self, pickled: bytes) -> RewardResult | list[RewardResult]:
        """Grade one sample (or a list of samples in one call); an exception of any kind is the result's error."""
        start = time.perf_counter()
        try:
            if self._broken:
                raise RuntimeError(self._broken)
            sample: Sample | list[Sample] = pickle.loads(pickled)
            value = self._grader(**self._arguments(sample), **self._kwargs)
            if inspect.iscoroutine(value):
                value = self._loop.run(value)
            if isinstance(sample, list):
                return [self._result(score, start) for score in one_each(value, len(sample), "the function")]
            return self._result(value, start)
        except BaseException as error:
            return self._failure(error, start)

    def _result(self, value: Any, start: float) -> RewardResult:
        try:
            return as_result(value, time.perf_counter() - start, self.error_score)
        except Exception as error:  # of this sample alone, in a batch too
            return self._failure(error, start)

    def _failure(self, error: BaseException, start: float) -> RewardResult:
        kind = "memory" if isinstance(error, MemoryError) else "exception"
        return RewardResult(self.error_score, {}, describe_error(error), time.perf_counter() - start, kind)

    def _arguments(self, sample: Sample | list[Sample]) -> dict[str, Any]:
        """What the grader asks for, by the names of its arguments; lists for a function of batches."""
        samples = sample if isinstance(sample, list) else [sample]
        filled = [s._replace(transcript=s.solution_str) if s.transcript is None else s for s in samples]
        columns = {name: [getattr(s, field) for s in filled] for field, name in self._names.items()}
        return columns if isinstance(sample, list) else {name: column[0] for name, column in columns.items()}


def as_result(value: Any, seconds: float, error_score: float) -> RewardResult:
    """What a grader returned for one sample, as result. Raises TypeError or ValueError when it is no score."""
    components: dict[str, Any] = {}
    steps: tuple[Step, ...] = ()
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"the grader returned a dict without 'score' (it has {', '.join(map(str, value))})")
        steps = as_steps(value.get("step_rewards", ()))
        said = {str(k): v for k, v in value.items() if k not in ("score", "step_rewards") and v is not None}
        components = {name: _plain(component) for name, component in said.items()}
        value = value["score"]
    number: Any = None if isinstance(value, str | bytes) else _unwrapped(value)  # texts are what float() reads
    try:
        score = float(number)
    except (TypeError, ValueError, RuntimeError):  # lists and tuples too, and arrays of several
        raise TypeError(f"the grader returned {value!r:.60}, not a number or a dict with 'score'") from None
    for name, number in {"score": score, **components}.items():
        if not (isinstance(number, str) or abs(number) <= _LARGEST):
            raise ValueError(f"the grader returned {number!r:.60} as {name}")
    error = components.get("error")
    if isinstance(error, str) and error:  # a grader that could not decide says why
        del components["error"]
        return RewardResult(error_score, components, error[:_MAX_TEXT], seconds, "undecided")
    return RewardResult(score, components, None, seconds, steps=steps)


def describe_error(error: BaseException) -> str:
    """One line: the kind of error, its message, and the place in the grader where it happened."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    line = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return _text(" ".join(f"{type(error).__name__}: {error}".split()))[:_MAX_TEXT] + line


def _plain(value: Any) -> Any:
    """Numbers and texts as exactly Python's own types, anything else as text: the parent must be able to read it."""
    value = _unwrapped(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "__float__"):
        return float(value)
    return _text(value) if isinstance(value, str) else _text(repr(value))[:_MAX_TEXT]


def _unwrapped(value: Any) -> Any:
    """Of an array (of NumPy or torch) its numbers in Python's types: one, or lists of several."""
    if hasattr(value, "tolist"):
        value = value.tolist()
        return value[0] if isinstance(value, list) and len(value) == 1 else value
    return value


def _text(text: str) -> str:
    """Without halves of surrogate pairs, which cannot be written anywhere."""
    return str(text).encode(errors="replace").decode()


LIMITS_MEMORY = sys.platform == "linux"  # other systems let RLIMIT_DATA be exceeded


def serve(
    channel: socket.socket,
    custom: CustomFunction | None,
    error_score: float,
    code_seconds: float,
    memory_mb: int | None,
) -> None:
    """What a grader process does: say that it is ready (None), then answer each sample with its result."""
    os.setsid()  # what graders start can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # More grader processes than cores: each one's libraries get one thread.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Graders may start processes, which a daemon may not; those know the grader's module, which none could import.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    # What a grader forks has no way to answer in the place of this process.
    pid, nowhere = os.getpid(), os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, channel.fileno(), inheritable=False))
    configure(code_seconds)
    if memory_mb and LIMITS_MEMORY:
        _limit_memory(memory_mb * 2**20)
    grading = Grading(custom, error_score)
    number, result, samples = 0, None, channel.makefile("rb")
    with suppress(EOFError, OSError):  # nobody is left to hear of it
        while True:
            reply = pickle.dumps(result)
            channel.sendall(HEADER.pack(len(reply), number) + reply)
            number, sample = pickle.load(samples)
            result = grading.grade(sample)
            if os.getpid() != pid:  # a grader has forked, and its child has come back from it
                os._exit(0)


def _limit_memory(size: int) -> None:
    import resource  # not on every system

    # Of data, not of addresses: libraries reserve many of those and use few. The hard limit stays, for programs that
    # a grader starts under limits of their own.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _end_with_parent() -> None:
    # A parent that is killed cannot stop its graders; a hung one would stay for ever.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)  # and what graders have started
