"""examples/data_preprocess/check.py: planted faults are found and named, sound data passes, mistakes are one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from valor.user_files import load_file

CHECK = load_file(str(Path(__file__).parents[3] / "examples" / "data_preprocess" / "check.py"), "path")

pytestmark = pytest.mark.slow

CUSTOM = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "broken":
        raise RuntimeError("cannot grade this")
    if ground_truth == "generous":
        return 1.0
    return {"score": float(solution_str.endswith(f"RESULT {ground_truth}")), "pred": solution_str[-3:]}
"""


def row(text: str, truth: Any, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        **more,
    }


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


SOUND = [row(f"What is {i} + {i}? Write it after ####.", str(2 * i)) for i in range(30)]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on these records; returns the exit code and what was printed."""

    def run(records: list[dict[str, Any]], *argv: Any) -> tuple[int, str]:
        code = CHECK.main([write(tmp_path / "train.jsonl", records), *map(str, argv)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_sound_data(check: Any, tmp_path: Path) -> None:
    test = [row(f"What is {i} + {i}? Write it after ####.", str(2 * i)) for i in range(50, 80)]
    code, printed = check(SOUND, "--test", write(tmp_path / "test.jsonl", test))
    assert code == 0, printed
    assert printed.endswith("ok\n") and "problem" not in printed


def test_a_function_of_batches_is_tried_as_one(check: Any, tmp_path: Path) -> None:
    arguments = "data_sources, solution_strs, ground_truths, extra_infos"
    for score, exit_code in (("0.0", 0), ("1.0", 1)):
        file = tmp_path / f"batch{exit_code}.py"
        file.write_text(f"def compute_score({arguments}):\n    return [{score}] * len(solution_strs)\n")
        code, printed = check(SOUND, "--custom", file)
        assert code == exit_code and ("for right: 30 of 30 rows" in printed) is bool(exit_code), printed


def test_each_planted_fault_is_found(check: Any, tmp_path: Path) -> None:
    planted = [
        row("What is six times seven? Write it after ####.", "forty-two"),  # line 31: its ground truth is no number
        row("What is seven times seven? Write it after ####.", ""),  # line 32: it has none
        row("What is 3 + 3?  Write it after ####.", "6"),  # line 33: as line 4, but for white space
        row("What is 4 + 4? Write it after ####.", "9"),  # line 34: contradicts line 5
        row("What is 1 + 9? Write it after ####.", "10", data_source="openai/gsm9k"),  # line 35: nobody grades it
        row("What is the number of legs of 70 cats? Write it after ####.", "280"),  # line 36: in the test set as well
        row("What is 1 + 1? " * 80 + "Write it after ####.", "2"),  # line 37: too long
        {**row("no messages", "2"), "prompt": "no messages"},  # line 38: cannot be read
    ]
    test = [row(f"what is the number of  legs of {i} cats?\nWrite it after ####.", str(4 * i)) for i in range(60, 90)]
    test.append(row("Q: what is love? Answer it.", "0"))
    tokenizer = tmp_path / "tokenizer"
    save_tokenizer(tokenizer)
    files = ("--test", write(tmp_path / "test.jsonl", test), "--model", tokenizer, "--max-prompt-length", 200)
    code, printed = check(SOUND + planted, *files)
    assert code == 1
    for words in (
        "the grader fails on 1 of 37 rows (line 31); the first: ValueError: the ground truth is not a number",
        "empty reward_model.ground_truth, which can never score: 1 of 37 rows (line 32)",
        "2 of 37 rows repeat a prompt that is there already, for example line 4 and line 33",
        "1 prompts occur with different ground truths, for example line 5 (8) and line 34 (9)",
        "data_source 'openai/gsm9k' (1 rows) has no grader",
        "1 of 37 prompts are in",
        "(line 36 = line 11)",
        "prompt over 200 tokens: 1 of 37 rows (line 37)",
        "line 38: 'prompt' must be a list of messages",
    ):
        assert words in printed, f"{words!r} is not in\n{printed}"
    assert printed.endswith("6 problems\n")


def save_tokenizer(folder: Path) -> None:
    """One token a byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)


def test_graders_of_your_own(check: Any, tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text(CUSTOM)
    mine = [row(f"Question {i}?", truth, data_source="mine") for i, truth in enumerate(["a", "broken", "generous"])]
    code, printed = check(mine, "--custom", grader)
    assert code == 1
    for words in (
        "the grader fails on 1 of 3 rows (line 2); the first: RuntimeError: cannot grade this (grader.py:",
        'the grader takes "I don\'t know." for right: 1 of 3 rows (line 3)',
    ):
        assert words in printed, f"{words!r} is not in\n{printed}"
    assert check(mine[:1], "--custom", grader)[0] == 0


def test_mistakes_are_one_line(check: Any, tmp_path: Path) -> None:
    for argv, words in (
        (("--custom", tmp_path / "no.py"), "no such file"),
        (("--test", tmp_path / "no.jsonl"), "no such file"),
        (("--max-prompt-length", 3), "say whose with --model"),
    ):
        code, printed = check(SOUND, *argv)
        assert code == 2 and printed.count("\n") == 1 and words in printed, printed
    assert CHECK.main([str(tmp_path / "no.jsonl")]) == 2
