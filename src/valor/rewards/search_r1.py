"""Search-R1's reward: exact match of the answer.

`verl/utils/reward_score/qa_em.py` of https://github.com/PeterGriffinJin/Search-R1.
"""

from typing import Any

from valor.rewards.answers import tagged
from valor.rewards.qa import MAX_LENGTH, MAX_PRED, aliases, measures, normalize, normalized

# What the search loop tells a policy that neither searches nor answers, in the words that Search-R1's models know.
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


def grade(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    transcript: str | None = None,
) -> dict[str, Any]:
    """Score 1 when the last `<answer>` is exactly an alias after SQuAD's normalization, else 0 (Search-R1's rule).

    What the policy is told, documents between `<information>` tags and `INVALID_ACTION`, is no answer. The documents of
    an episode are in its `transcript`, which has them all.

    Components: `acc` 1 when right, `em`, `f1`, `contains` of what stands in `<answer>`, `format` 1 with `<answer>`,
    `retrieved` 1 when a document holds an alias, `searches` with documents, `pred`.
    """
    policy_text, documents = split_documents(solution_str)
    if transcript is not None:
        documents = split_documents(transcript)[1]
    inside, truths = tagged(policy_text), aliases(ground_truth)
    result = measures((inside or "")[:MAX_LENGTH], truths)
    plain = [normalize(document) for document in documents]
    return {
        "score": result["em"],
        "acc": result["em"],
        **result,
        "format": float(inside is not None),
        "retrieved": float(any(truth in document for truth in map(normalized, truths) for document in plain)),
        "searches": float(len(documents)),
        "pred": normalize(inside or "")[:MAX_PRED],
    }


def split_documents(text: str) -> tuple[str, list[str]]:
    """The text without what the policy was told, and each part of it that stands between `<information>` tags.

    Documents stand behind a `</search>`, where a turn ends; elsewhere these tags are the policy's own words.
    """
    policy_text, documents = [], []
    for part in text.split(INVALID_ACTION):  # a turn begins behind it, too
        rest = part
        while True:
            before, _, behind = rest.partition("<information>")
            document, closed, behind = behind.partition("</information>")
            if not closed:
                break
            policy_text.append(before)
            (documents if before.rstrip().endswith("</search>") else policy_text).append(document)
            rest = behind
        policy_text.append(rest)
    return "".join(policy_text), documents
