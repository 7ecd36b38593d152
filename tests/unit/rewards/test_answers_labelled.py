"""Every grader against labelled answers in two languages; docs/graders.md shows ten of each.

A line of `answers/*.jsonl`: `source` ("judge": a judge's reply), `truth` (of a judge the range of scores), `response`,
`score` (of a judge None for no verdict), `language`, `kind`; perhaps `choices`, other `extra`, and `doc` for the page.
"""

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from valor.config.reward import JudgeConfig
from valor.rewards import compute_score
from valor.rewards.judge import Judge
from valor.user_files import load_file

ROOT = Path(__file__).parents[3]
FILES = sorted((Path(__file__).parent / "answers").glob("*.jsonl"))
PAGE = load_file(str(ROOT / "benchmarks" / "grader_docs.py"), "path")
HOSTILE = {"listing", "denial", "quotation", "empty"}


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@functools.cache
def judge(low: float, high: float) -> Judge:
    return Judge(JudgeConfig(url="http://127.0.0.1:9/v1", model="m", score_range=(low, high)), 0.0)


def graded(row: dict[str, Any]) -> float | None:
    if row["source"] == "judge":
        try:
            return judge(*row["truth"]).read(row["response"])
        except RuntimeError:
            return None
    extra = {**row.get("extra", {}), **({"choices": row["choices"]} if "choices" in row else {})}
    return compute_score(row["source"], row["response"], row["truth"], extra)["score"]  # type: ignore[index]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_labelled_answers(file: Path) -> None:
    if file.stem == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    rows = read(file)
    wrong = [
        (row["truth"], row["response"], row["score"], found) for row in rows if (found := graded(row)) != row["score"]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_labels_cover_two_languages_and_hostile_answers() -> None:
    rows = [row for file in FILES for row in read(file)]
    languages = Counter(row["language"] for row in rows)
    assert set(languages) == {"en", "zh"} and min(languages.values()) >= 120
    assert 3 * sum(not row["score"] for row in rows) >= len(rows)
    assert {row["kind"] for row in rows} >= HOSTILE
    assert all(not row["score"] for row in rows if row["kind"] in HOSTILE - {"quotation"})
    texts = Counter(json.dumps({**row, "doc": None}) for row in rows)
    assert max(texts.values()) == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ten_of_each_are_on_the_page(file: Path) -> None:
    assert sum(row.get("doc", False) for row in read(file)) == 10


def test_the_page_is_up_to_date() -> None:
    made = PAGE.render_docs()
    assert (ROOT / "docs" / "graders.md").read_text(encoding="utf-8") == made, (
        "run: python benchmarks/grader_docs.py > docs/graders.md"
    )
