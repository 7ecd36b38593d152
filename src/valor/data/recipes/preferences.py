"""Pairs of answers of which people or a judge preferred one: for `valor rm train`."""

from __future__ import annotations

import re
from typing import Any

from valor.data.recipes.recipe import Pair, Record, published, text, value

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def hh_rlhf(record: Record) -> Pair | None:
    """A conversation and two last turns of the assistant; left out where the two are the same.

    Takes the columns prompt, chosen, rejected, or whole conversations in the last two (Anthropic's own files).
    """
    chosen, rejected = (str(value(record, name)) for name in ("chosen", "rejected"))
    prompt = str(record.get("prompt") or "")
    if not prompt:
        prompt, chosen = _split_last_turn(chosen)
        other, rejected = _split_last_turn(rejected)
        if other != prompt:
            return None  # a few conversations part ways earlier: then the two answer different questions
    if chosen.strip() == rejected.strip():
        return None
    return Pair(conversation(prompt), chosen.strip(), rejected.strip(), str(record.get("source") or "hh_rlhf"))


def conversation(transcript: str) -> list[dict[str, str]]:
    """`\\n\\nHuman: … \\n\\nAssistant: …` as messages, up to the turn that the assistant is to write."""
    first, *pieces = _TURN.split(transcript)
    if first.strip() or not pieces:
        raise ValueError(f"the conversation must begin with 'Human:', got {transcript!r:.60}")
    turns = [
        {"role": _ROLES[name], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns.pop()
    return turns


def _split_last_turn(transcript: str) -> tuple[str, str]:
    before, mark, last = transcript.rpartition("\n\nAssistant:")
    if not mark:
        raise ValueError("has no 'Assistant:' turn")
    return before + mark, last


def ultrafeedback(record: Record) -> Pair | None:
    """Two whole conversations; left out where the judge gave both the same score or they end in the same words."""
    chosen, rejected = value(record, "chosen"), value(record, "rejected")
    if "score_chosen" in record and record["score_chosen"] == record.get("score_rejected"):
        return None
    best, worst = _last(chosen), _last(rejected)
    prompt: Any = chosen[:-1] or text(record, "prompt")
    return None if best == worst else Pair(prompt, best, worst, "ultrafeedback")


def _last(messages: Any) -> str:
    if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
        raise ValueError("'chosen' and 'rejected' must be lists of messages that end with the assistant's")
    return str(messages[-1]["content"]).strip()


_PAIRS = {"ability": "alignment", "pairs": True, "takes_rows": False}
RECIPES = (
    published(
        "hh_rlhf",
        "helpful and harmless conversations, 112,052 + 12,451 pairs",
        hh_rlhf,
        "Dahoas/full-hh-rlhf",
        columns=("prompt", "chosen", "rejected", "source"),
        **_PAIRS,
    ),
    published(
        "ultrafeedback",
        "UltraFeedback, 61,135 + 2,000 pairs scored by a judge",
        ultrafeedback,
        "HuggingFaceH4/ultrafeedback_binarized",
        train="train_prefs",
        test="test_prefs",
        columns=("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
        **_PAIRS,
    ),
)
