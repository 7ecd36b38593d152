"""math-verify, kept within limits: what it may be given, and for how long it may think.

Its own time limits are signals, which only reach the main thread, and turn into a silent "wrong". They are switched
off; `run_within` ends a comparison in any thread, and that is an error, never a verdict.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Sequence

from valor.rewards.deadline import run_within

SECONDS = 1.3  # of computing, for one comparison; the import counts
_AT_LEAST = 0.9  # however long the import took
_MAX_LENGTH, _MAX_NESTING = 400, 12
# What Python would compute in one call that nothing can interrupt: powers of powers, long numbers, huge factorials.
_HUGE = re.compile(
    r"\^\s*\{[^{}]*\^|\^\s*\([^()]*\^|\^\s*\w+\s*\^"  # a power in an exponent
    r"|(?:\^|\*\*)\s*[{(]?\s*-?\d{5}|\*\*[^*]{0,20}\*\*|\d{40}|\d{4}\s*\)?!|!\s*\)?\s*!|binom\s*\{\s*(?:\d{5}|[^{}]*\^)"
)


class Undecided(Exception):
    """Neither right nor wrong: it could not be found out."""


def is_too_large(text: str) -> bool:
    """Whether parsing or evaluating the text could take long."""
    depth = deepest = 0
    for c in text[:_MAX_LENGTH]:
        depth += (c in "([{") - (c in ")]}")
        deepest = max(deepest, depth)
    return len(text) > _MAX_LENGTH or deepest > _MAX_NESTING or bool(_HUGE.search(text))


def any_equal_by_algebra(pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether math-verify finds an answer equal to its ground truth. A too large answer to a modest truth is not.

    Raises Undecided after `SECONDS`, and for a ground truth that is too large.
    """
    safe = [pair for pair in pairs if not any(map(is_too_large, pair))]
    if safe and _verify(safe):
        return True
    if any(is_too_large(truth) for truth, _ in pairs):
        raise Undecided("the ground truth is too large for computer algebra")
    return False


def _verify(pairs: Sequence[tuple[str, str]]) -> bool:
    start = time.thread_time()
    verify, forget = _library()
    seconds = max(SECONDS - (time.thread_time() - start), _AT_LEAST)
    try:
        return run_within(seconds, lambda: any(verify(truth, answer) for truth, answer in pairs))
    except TimeoutError:
        forget()  # a computation that was cut off leaves half-made facts in sympy's caches
        raise Undecided(f"computer algebra did not decide within {SECONDS:g} s") from None


@functools.cache
def _library() -> tuple[Callable[[str, str], bool], Callable[[], None]]:
    """Imported at first use: it takes most of a second and 60 MB."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.parser import extract_latex, parse_expr_cached, parse_latex_cached
    from sympy.core.cache import clear_cache
    from sympy.core.parameters import global_parameters

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    config = [LatexExtractionConfig()]

    def same(truth: str, answer: str) -> bool:
        gold, pred = (parse(f"${text}$", config, parsing_timeout=None) for text in (truth, answer))  # type: ignore[arg-type]
        return verify(gold, pred, allow_set_relation_comp=True, timeout_seconds=None)

    def forget() -> None:
        for cached in (extract_latex, parse_expr_cached, parse_latex_cached):
            cached.cache_clear()
        clear_cache()
        global_parameters.evaluate = True

    return same, forget
