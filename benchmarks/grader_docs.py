"""`python benchmarks/grader_docs.py > docs/graders.md`: what each grader takes for an answer, from labelled answers."""

import json
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[1] / "tests" / "unit" / "rewards" / "answers"

_HEAD = """\
# What graders take for an answer

<!-- Made from tests/unit/rewards/answers: python benchmarks/grader_docs.py > docs/graders.md -->

Each table has ten of the labelled answers that the tests hold the graders to; ↵ is a line break. All graders read what
follows the thoughts (`</think>`, gpt-oss's analysis), in English and Chinese, full-width marks and digits included. Of
an episode with tools or an environment they read the policy's last turn without its calls
([rewards](rewards.md#what-a-grader-reads)).
"""

# By name of the file: the heading, and what counts.
_TEXTS = {
    "mathematics": (
        "Mathematics",
        """\
The last `<answer>`, else the last box, else what follows `####` or the last announcement ("the answer is", 答案是),
else the last formula or number. It is right when it means the ground truth: numbers by value, units converted,
formulas by computer algebra. An answer that is denied, or only supposed, is none.""",
    ),
    "gsm8k": (
        "GSM8K",
        """\
`openai/gsm8k` takes the number behind the last `####`, `openai/gsm8k-flexible` the last number of the response.
Numbers are compared by exact value.""",
    ),
    "choice": (
        "Multiple choice",
        """\
The option that the response chooses in the end: announced, called right, or named alone, by its letter or by its
text. A later verdict takes back an earlier one. An option that is denied or called wrong is not chosen; to name
several is no choice, and neither is a question. The article A, the pronoun I and options that are only quoted are
no letters.""",
    ),
    "qa": (
        "Questions",
        """\
One answer: what stands in `<answer>` or a box, is announced, or is the first sentence, of which one side of the
verb is read. It is right when it is one of the aliases but for spelling: case, punctuation, articles, accents,
plurals, number words, the order of a date. A list, a denial and a question are wrong. `extra_info["match"]` asks
for `contains` or `f1` in place of the exact match.""",
    ),
    "search_r1": (
        "Search-R1",
        """\
What stands in the policy's last `<answer>` must be one of the aliases after SQuAD's normalization. Documents
between `<information>` tags are not the policy's, and nothing outside the tag counts.""",
    ),
    "countdown": (
        "Countdown and the Game of 24",
        """\
The expression in `<answer>`, a box, behind "Answer:" or in the last line, with or without its value. It is right
when it uses every number once, with + - * / alone, and is exactly the target.""",
    ),
    "code": (
        "Programs",
        """\
The last Python block, or without one the last block of no language, or all of the response; where tests name a
function, the last block that defines it. It is right when it passes every test, in a sandbox.""",
    ),
    "reasoning_gym": (
        "reasoning-gym",
        """\
What stands in `<answer>`, else in a box, else all of the response; the task's own `score_answer` says what it is
worth, which may be part of the score.""",
    ),
    "walk": (
        "Walks",
        """\
All of the response, to the character: doors and rooms of a whole walk. The score is its mean gain.""",
    ),
    "judge": (
        "Judges",
        """\
Of a judge's reply the last line that begins with a verdict, such as `Score: 7`, thoughts aside; a fraction is that
part of the highest score. A number that is quoted behind the verdict does not count. A reply that was cut off, says
nothing of the form, or gives a score out of range is an error of the sample. Examples are for scores from -10 to
10.""",
    ),
}


def render_docs() -> str:
    """The text of docs/graders.md."""
    parts = [_HEAD]
    for name, (title, text) in _TEXTS.items():
        file = ANSWERS / f"{name}.jsonl"
        if file.exists():
            parts += [f"## {title}\n", f"{text}\n", _table(list(map(json.loads, file.read_text("utf-8").splitlines())))]
    return "\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [row for row in rows if row.get("doc")]
    with_truth = shown[0]["source"] != "judge"
    head = ["response", *["ground truth"] * with_truth, "score"]
    lines = [
        [_code(row["response"]), *[_truth(row)] * with_truth, "none" if row["score"] is None else f"{row['score']:g}"]
        for row in shown
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines]) + "\n"


def _truth(row: dict[str, Any]) -> str:
    truth = row["truth"]
    text = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    choices = f" of {', '.join(row['choices'])}" if "choices" in row else ""
    return _code(text) + choices


def _code(text: str) -> str:
    """A code span in a cell of a table; it may hold backticks."""
    text = text.replace("\n", "↵").replace("|", "\\|")
    fence = "`" * next(n for n in range(1, 9) if "`" * n not in text)
    space = " " * ("`" in text)
    return f"{fence}{space}{text}{space}{fence}" if text else "(empty)"


if __name__ == "__main__":
    print(render_docs(), end="")
