"""Which prompts ask the same thing: equal but for capitals, white space and the instruction around the question."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_FEWEST_ROWS = 20  # below this, what prompts have in common may be chance rather than an instruction
_FEWEST_WORDS = 5  # shorter questions say too little without their instruction


def same_text(messages: Messages) -> str:
    """What two prompts that differ in capitals and white space alone have in common."""
    return normalized("\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages))


def normalized(text: str) -> str:
    """Text without differences in capitals, white space and Unicode composition."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def bare_questions(prompts: Sequence[Messages], groups: Sequence[str]) -> list[str]:
    """Each prompt's last message, normal, without the words that all of its group begin and end with.

    Those words are the instruction. The whole text stays where a group is small or the rest would be too short.
    """
    words = [normalized(str(messages[-1].get("content"))).split() for messages in prompts]
    members: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    bare = [" ".join(one) for one in words]
    for rows in members.values():
        start = _shared([words[i] for i in rows])
        end = _shared([words[i][start:][::-1] for i in rows])
        for i in rows if len(rows) >= _FEWEST_ROWS else ():
            rest = words[i][start : len(words[i]) - end]
            bare[i] = " ".join(rest) if len(rest) >= _FEWEST_WORDS else bare[i]
    return bare


def _shared(lists: list[list[str]]) -> int:
    """How many words all lists begin with."""
    columns = zip(*lists, strict=False)  # as long as the shortest list
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def repeats(keys: Iterable[str]) -> list[list[int]]:
    """Places of equal keys, for every key that occurs more than once."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        places[key].append(i)
    return [found for found in places.values() if len(found) > 1]


def shared_prompts(
    prompts: Sequence[Messages], groups: Sequence[str], others: Sequence[Messages], other_groups: Sequence[str]
) -> list[tuple[int, int]]:
    """Pairs (place, place in `others`) of prompts that ask the same, each place of the first at most once."""
    places: dict[str, int] = {}
    for keys in (map(same_text, others), bare_questions(others, other_groups)):
        for i, key in enumerate(keys):
            places.setdefault(key, i)
    found = zip(map(same_text, prompts), bare_questions(prompts, groups), strict=True)
    matches = ((i, places.get(whole, places.get(bare))) for i, (whole, bare) in enumerate(found))
    return [(i, other) for i, other in matches if other is not None]
