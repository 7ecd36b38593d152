"""Search-R1's reward: exact match of the answer; on request something for the form of the search and for what it found.

`verl/utils/reward_score/qa_em.py` and `qa_em_format.py` of https://github.com/PeterGriffinJin/Search-R1.
"""

import re
from typing import Any

from valor.rewards.answers import tagged
from valor.rewards.qa import MAX_LENGTH, MAX_PRED, aliases, measures, normalize, normalized

# What the search loop tells a policy that neither searches nor answers, in the words that Search-R1's models know.
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
# What a tag leads to, by where it stands; anything else is no form that counts.
_NEXT = {
    ("start", "<think>"): "thinking",
    ("informed", "<think>"): "thinking",
    ("thinking", "</think>"): "thought",
    ("thought", "<search>"): "searching",
    ("searching", "</search>"): "searched",
    ("searched", "<information>"): "reading",
    ("reading", "</information>"): "informed",
    ("thought", "<answer>"): "answering",
    ("answering", "</answer>"): "end",
}
_WITH_TEXT = ("thinking", "searching", "reading", "answering")


def grade(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
) -> dict[str, Any]:
    """Score 1 when the last `<answer>` is exactly an alias after SQuAD's normalization, else 0 (Search-R1's rule).

    What the policy is told, documents between `<information>` tags and `INVALID_ACTION`, is no answer. Of a response
    that is not well formed (`well_formed` below) `structure_format_score` is taken away if it is right, and it is worth
    `final_format_score` if it has a wrong answer; a wrong one that is well formed is worth `structure_format_score`,
    and `retrieval_score` more if a document holds an alias.

    Components: `acc` 1 when right, `em`, `f1`, `contains` of what stands in `<answer>`, `format` 1 with `<answer>`,
    `well_formed` 1 when thoughts, searches, information and the answer follow each other and nothing stands between,
    `retrieved` 1 when a document holds an alias, `searches` with documents, `pred`.
    """
    own, documents = split_documents(solution_str)
    inside, truths = tagged(own), aliases(ground_truth)
    result = measures((inside or "")[:MAX_LENGTH], truths)
    valid, found = well_formed(solution_str), holds_answer(documents, truths)
    if result["em"]:
        score = 1.0 if valid else 1.0 - structure_format_score
    elif valid:
        score = structure_format_score + (retrieval_score if found else 0.0)
    else:
        score = 0.0 if inside is None else final_format_score
    return {
        "score": score,
        "acc": result["em"],
        **result,
        "format": float(inside is not None),
        "well_formed": float(valid),
        "retrieved": float(found),
        "searches": float(len(documents)),
        "pred": normalize(inside or "")[:MAX_PRED],
    }


def split_documents(text: str) -> tuple[str, list[str]]:
    """The text without what the policy was told, and each part of it that stands between `<information>` tags.

    Documents stand behind a `</search>`, where a turn ends; elsewhere these tags are the policy's own words.
    """
    own, documents = [], []
    for part in text.split(INVALID_ACTION):  # a turn begins behind it, too
        rest = part
        while True:
            before, _, behind = rest.partition("<information>")
            document, closed, behind = behind.partition("</information>")
            if not closed:
                break
            own.append(before)
            (documents if before.rstrip().endswith("</search>") else own).append(document)
            rest = behind
        own.append(rest)
    return "".join(own), documents


def well_formed(text: str) -> bool:
    """Think, then search and be informed, as often as wanted; then answer. Nothing but white space in between."""
    state = "start"
    for i, part in enumerate(_TAG.split(text)):
        if i % 2:  # split puts the tags at odd places
            state = _NEXT.get((state, part), "")
        elif part.strip() and state not in _WITH_TEXT:
            return False
    return state == "end"


def holds_answer(documents: list[str], truths: list[str]) -> bool:
    """Whether one of the documents has an alias in it, after SQuAD's normalization."""
    plain = [normalize(document) for document in documents]
    return any(truth in document for truth in map(normalized, truths) for document in plain)
