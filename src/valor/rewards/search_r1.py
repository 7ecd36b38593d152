"""Search-R1's reward: exact match of the answer.

`verl/utils/reward_score/qa_em.py` of https://github.com/PeterGriffinJin/Search-R1.
"""

import re
from typing import Any

from valor.rewards.answers import tagged
from valor.rewards.qa import MAX_LENGTH, MAX_PRED, aliases, measures, normalize

# What the search loop tells a policy that neither searches nor answers, in the words that Search-R1's models know.
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_DOCUMENT = re.compile(r"(?<=</search>)\s*<information>")


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the last `<answer>` is exactly an alias after SQuAD's normalization, else 0 (Search-R1's rule).

    What the policy is told, documents between `<information>` tags and `INVALID_ACTION`, is no answer.

    Components: `acc` 1 when right, `em`, `f1`, `contains` of what stands in `<answer>`, `format` 1 with `<answer>`,
    `pred`.
    """
    inside = tagged(policy_text(solution_str))
    result = measures((inside or "")[:MAX_LENGTH], aliases(ground_truth))
    return {
        "score": result["em"],
        "acc": result["em"],
        **result,
        "format": float(inside is not None),
        "pred": normalize(inside or "")[:MAX_PRED],
    }


def policy_text(text: str) -> str:
    """The text without documents and `INVALID_ACTION`.

    Documents stand behind a `</search>`, where a turn ends; elsewhere these tags are the policy's own words.
    """
    *closed, rest = text.split("</information>")
    before_documents = [_DOCUMENT.split(part, maxsplit=1)[0] for part in closed]
    return "".join([*before_documents, rest]).replace(INVALID_ACTION, "")
