"""Rewards for how a response is written, as functions to be added to a grader's score: format and repetition.

All take the text and return a number; `combine` makes a grader of a grader and some of them. Where a template opens
`<think>` in the prompt, a response begins inside the thoughts: their opening tag may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from valor.rewards.answers import boxed

TextReward = Callable[[str], float]
Grader = Callable[..., Any]

_THINK_ANSWER = re.compile(
    r"\s*(?:<think>)?(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)


def has_think_and_answer(text: str) -> float:
    """1 when all of the response is `<think>…</think><answer>…</answer>`, each tag once, else 0 (DeepSeek-R1-Zero)."""
    return float(_THINK_ANSWER.fullmatch(text) is not None)


def has_think_and_box(text: str) -> float:
    r"""1 when thoughts in `<think>` are followed by a `\boxed{…}`, else 0."""
    before, tag, after = text.partition("</think>")
    opened = "<think>" not in before.lstrip().removeprefix("<think>")
    return float(bool(tag) and opened and "</think>" not in after and boxed(after) is not None)


def repetition_penalty(text: str, n: int = 4) -> float:
    """Minus the part of the text's n-word pieces that have been there before: 0 (all new) to nearly -1 (a loop).

    https://arxiv.org/abs/2502.03373, appendix on the n-gram repetition penalty.
    """
    words = text.split()
    count = len(words) - n + 1
    if count <= 0:
        return 0.0
    return len({tuple(words[i : i + n]) for i in range(count)}) / count - 1.0


def combine(grader: Grader, parts: Mapping[str, TextReward], weights: Mapping[str, float]) -> Grader:
    """A grader whose score is a weighted sum of `acc` (the grader's own score) and the parts, each a component.

    `weights` has an entry for `acc` and for each part. As `acc` decides what is correct, format alone never is.
    """
    if weights.keys() != {"acc", *parts}:
        raise ValueError(f"weights must be given for {', '.join(['acc', *parts])}")

    def graded(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        result = grader(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        result = dict(result) if isinstance(result, Mapping) else {"score": result}
        own = {"acc": result["score"], **{part: reward(solution_str) for part, reward in parts.items()}}
        return {**result, **own, "score": sum(weights[key] * own[key] for key in own)}

    terms = [f"{weight:g} x `{key}`" for key, weight in weights.items()]
    graded.__doc__ = f"Score {' + '.join(terms)} of {grader.__module__}.\n\nComponents: {', '.join(terms)}."
    return graded
