"""Mathematics, GSM8K and Countdown against answers labelled by hand, in English and Chinese."""

import json
from pathlib import Path
from typing import Any

import pytest

from valor.rewards import compute_score

FOLDER = Path(__file__).parent / "answers"
LINES = [
    json.loads(line)
    for name in ("mathematics", "gsm8k", "countdown")
    for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['truth']} | {line['response'][-40:]}")
def test_labelled_answer(line: dict[str, Any]) -> None:
    result: Any = compute_score(line["source"], line["response"], line["truth"])
    assert result["score"] == line["score"] and "error" not in result
