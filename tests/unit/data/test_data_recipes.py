"""Every recipe: records as the hub publishes them become the rows that training reads, from there and from files."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest

from valor.data.build import Request, prepare
from valor.data.files import DataRow, read_rows
from valor.data.recipes import RECIPES, find_recipe, last_boxed
from valor.errors import UserError
from valor.rewards import compute_score

ASSERTION = "assert add(1, 2) == 3"

# One record of every hub data set in its layout, with the row's ground truth, and words that the prompt must have.
PUBLISHED: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "gsm8k": ({"question": "How many?", "answer": "First.\n#### 1,072"}, "1072", ["How many?", "####"]),
    "math": (
        {"problem": "Find $x$.", "level": "Level 2", "type": "Algebra", "solution": "So $\\boxed{\\frac{1}{2}}$."},
        "\\frac{1}{2}",
        ["Find $x$.", "\\boxed{}"],
    ),
    "math500": (
        {"problem": "Find $y$.", "solution": "…", "answer": "3", "subject": "Algebra", "level": 2, "unique_id": "a"},
        "3",
        ["Find $y$.", "\\boxed{}"],
    ),
    "aime24": (
        {"id": 60, "problem": "P?", "solution": "…", "answer": "204", "url": "u", "year": "2024"},
        "204",
        ["P?"],
    ),
    "aime25": ({"problem": "P?", "answer": "70", "id": "0"}, "70", ["P?"]),
    "dapo_math": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "Solve. The last line is Answer: $Answer\n\nWhat is 1+1?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        "2",
        ["What is 1+1?"],
    ),
    "game24": ({"Rank": 1, "Puzzles": "1 1 4 6"}, {"numbers": [1, 1, 4, 6], "target": 24}, ["1, 1, 4, 6", "<answer>"]),
    "nq": (
        {"id": "test_0", "question": "who?", "golden_answers": ["Ada", "Lady Ada"]},
        {"target": ["Ada", "Lady Ada"]},
        ["who?", "<answer>"],
    ),
    "hotpotqa": (
        {"id": "d0", "question": "who?", "golden_answers": ["Rome"], "metadata": {"type": "bridge"}},
        {"target": ["Rome"]},
        ["who?"],
    ),
    "mmlu": (
        {"question": "Which?", "subject": "law", "choices": ["w", "x", "y", "z"], "answer": 2},
        "C",
        ["Which?", "A. w", "D. z", "Answer: X"],
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def one():\n",
            "canonical_solution": "    return 1\n",
            "test": "def check(f):\n    assert f() == 1",
            "entry_point": "one",
        },
        json.dumps({"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}),
        ["def one():", "```python"],
    ),
    "mbpp": (
        {
            "task_id": 2,
            "text": "Write add.",
            "code": "def add(a, b): return a + b",
            "test_list": [ASSERTION],
            "test_setup_code": "import math",
            "challenge_test_list": [],
        },
        json.dumps({"test_list": [ASSERTION], "test_setup_code": "import math"}),
        ["Write add.", ASSERTION],
    ),
}
PAIRS = {
    "hh_rlhf": {
        "prompt": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: How?\n\nAssistant:",
        "response": " Well.",
        "chosen": " Well.",
        "rejected": " Bad.",
    },
    "ultrafeedback": {
        "prompt": "How?",
        "prompt_id": "1",
        "chosen": [{"content": "How?", "role": "user"}, {"content": "Well.", "role": "assistant"}],
        "rejected": [{"content": "How?", "role": "user"}, {"content": "Bad.", "role": "assistant"}],
        "score_chosen": 8.0,
        "score_rejected": 5.0,
    },
}


def rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """load_dataset gives the record above for the places that the recipes name; returns what was asked for."""
    asked = []

    def load_dataset(path: str, config: str | None = None, *, split: str) -> datasets.Dataset:
        asked.append((path, config, split))
        known = {**{name: record for name, (record, _, _) in PUBLISHED.items()}, **PAIRS}
        for name, record in known.items():
            if any((p.path, p.config, p.split) == asked[-1] for places in RECIPES[name].hub.values() for p in places):
                return datasets.Dataset.from_list([record])
        raise FileNotFoundError(path)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_every_recipe_of_the_hub_is_tested_here() -> None:
    assert set(PUBLISHED) | set(PAIRS) | {"search"} == {n for n, r in RECIPES.items() if r.generate is None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_from_the_hub_and_from_files_are_the_same(name: str, tmp_path: Path, hub: list[Any]) -> None:
    record, truth, words = PUBLISHED[name]
    recipe = find_recipe(name)
    prepare(Request(recipe), tmp_path / "hub")
    assert [(p.path, p.config, p.split) for s in recipe.hub for p in recipe.hub[s]] == hub
    for kind in ("jsonl", "parquet"):
        source = tmp_path / kind
        source.mkdir()
        if kind == "jsonl":
            (source / "a.jsonl").write_text(json.dumps(record) + "\n")
        else:
            datasets.Dataset.from_list([record]).to_parquet(source / "a.parquet")
        files = [f"{split}={source}/a.{kind}" for split in recipe.hub]
        prepare(Request(recipe, local=files), tmp_path / f"from_{kind}")
    for split in recipe.hub:
        (row,) = rows(tmp_path / "hub" / f"{split}.parquet")
        assert rows(tmp_path / "from_jsonl" / f"{split}.parquet") == [row]
        assert rows(tmp_path / "from_parquet" / f"{split}.parquet") == [row]
        assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
        assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, 0)
        assert all(word in row["prompt"][-1]["content"] for word in words)
        assert "{question}" not in row["prompt"][-1]["content"]
        assert row["data_source"] and row["ability"]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_and_what_they_become(name: str, tmp_path: Path, hub: list[Any]) -> None:
    recipe = find_recipe(name)
    for form in ("pairs", "prompts", "sft"):
        prepare(Request(recipe, form=form), tmp_path / form)
    (pair,) = rows(tmp_path / "pairs" / "train.parquet")
    assert set(pair) == {"prompt", "chosen", "rejected", "source"}
    assert (pair["prompt"][-1], pair["chosen"], pair["rejected"]) == (
        {"role": "user", "content": "How?"},
        "Well.",
        "Bad.",
    )
    (prompt,) = rows(tmp_path / "prompts" / "test.parquet")
    assert prompt["prompt"] == pair["prompt"]
    assert prompt["reward_model"] == {"style": "model", "ground_truth": "Well."}
    (chat,) = rows(tmp_path / "sft" / "train.parquet")
    assert chat["messages"] == [*pair["prompt"], {"role": "assistant", "content": "Well."}]


def test_pairs_of_one_text_are_left_out(tmp_path: Path) -> None:
    chat = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: How?\n\nAssistant:"
    records = [
        {"prompt": chat, "chosen": " Well.", "rejected": " Bad."},
        {"prompt": chat, "chosen": " Same.", "rejected": " Same."},  # says nothing
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = prepare(Request(find_recipe("hh_rlhf"), local=[str(tmp_path / "a.jsonl")], splits=["train"]), tmp_path)
    assert lines[1] == "train: 1 records without a usable answer were left out"
    (pair,) = rows(tmp_path / "train.parquet")
    assert [m["content"] for m in pair["prompt"]] == ["Hi", "Hello.", "How?"]
    assert (pair["chosen"], pair["rejected"]) == ("Well.", "Bad.")


def test_several_places_keep_their_data_sources(tmp_path: Path, hub: list[Any]) -> None:
    prepare(Request(find_recipe("search")), tmp_path)
    assert [r["data_source"] for r in rows(tmp_path / "train.parquet")] == ["searchR1_nq", "searchR1_hotpotqa"]
    prepare(Request(find_recipe("search"), data_source="mine"), tmp_path)
    assert [r["data_source"] for r in rows(tmp_path / "train.parquet")] == ["mine", "mine"]


def test_search_rows_have_search_r1_s_words_and_verl_s_columns(tmp_path: Path) -> None:
    records = [
        {"question": " who wrote it ", "answer": ["Ada", "Lady Ada"]},
        {"question": "Where?", "golden_answers": ["Rome"], "data_source": "hotpotqa"},
        {"question": "Why?", "golden_answers": []},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    request = Request(find_recipe("search"), local=[f"train={tmp_path / 'a.jsonl'}"], splits=["train"])
    lines = prepare(request, tmp_path)
    assert lines[1:] == ["train: 1 records without a usable answer were left out"]
    first, second = rows(tmp_path / "train.parquet")
    words = first["prompt"][0]["content"]
    # Of the script that is named in data/recipes.py, with this question.
    assert (
        hashlib.sha256(words.encode()).hexdigest() == "7f3b0998f4e30a26289277eb0af565a12c6a788a83e4bbde88d2504eb2496508"
    )
    assert words.endswith("For example, <answer> Beijing </answer>. Question: who wrote it?\n")
    truth = {"target": ["Ada", "Lady Ada"]}
    assert first["extra_info"] == {
        "split": "train",
        "index": 0,
        "question": "who wrote it?",
        "need_tools_kwargs": True,
        "tools_kwargs": {
            "search": {
                "create_kwargs": {"ground_truth": truth, "question": "who wrote it?", "data_source": "searchR1_qa"}
            }
        },
    }
    assert first["reward_model"] == {"style": "rule", "ground_truth": truth}
    assert [row["data_source"] for row in (first, second)] == ["searchR1_qa", "searchR1_hotpotqa"]
    prepare(replace(request, data_source="searchR1_mine"), tmp_path)
    assert [row["data_source"] for row in rows(tmp_path / "train.parquet")] == ["searchR1_mine"] * 2


def test_a_clone_of_the_hub_s_repository(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    configs = []
    for name in ("nq", "hotpotqa"):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text(json.dumps(PUBLISHED[name][0]) + "\n")
        configs.append(f"- config_name: {name}\n  data_files: [{{split: train, path: {name}/train.jsonl}}]\n")
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    prepare(Request(find_recipe("search"), local=[str(folder)], splits=["train"]), tmp_path / "local")
    made = rows(tmp_path / "local" / "train.parquet")
    assert [r["data_source"] for r in made] == ["searchR1_nq", "searchR1_hotpotqa"]
    assert [r["reward_model"]["ground_truth"] for r in made] == [
        {"target": ["Ada", "Lady Ada"]},
        {"target": ["Rome"]},
    ]


def test_dapo_math_keeps_one_of_its_copies_and_can_hold_a_test_set_out(tmp_path: Path) -> None:
    record, _, _ = PUBLISHED["dapo_math"]
    problems = [{**record, "prompt": [{"role": "user", "content": f"Problem {i}?"}]} for i in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems * 3))
    request = Request(find_recipe("dapo_math"), local=[str(tmp_path / "a.jsonl")], test_size=3)
    lines = prepare(request, tmp_path)
    assert "train: 20 rows repeat another row's prompt, left out" in lines
    train, test = (rows(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    texts = [{row["prompt"][0]["content"] for row in split} for split in (train, test)]
    assert (len(train), len(test), len(texts[0] | texts[1])) == (7, 3, 10)
    assert [row["extra_info"]["index"] for row in train] == list(range(7))


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{a{b}c} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{7}", "7"),
        ("$\\boxed 5$", "5"),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer


def right_answers(row: DataRow) -> list[str]:
    """One of these should score: the data's own solution, else the ground truth in one of the usual ways."""
    if solution := row.extra_info.get("solution"):
        return [str(solution), f"```python\n{solution}\n```"]
    truth = row.ground_truth.get("target") if isinstance(row.ground_truth, dict) else row.ground_truth
    texts = truth if isinstance(truth, list) else [truth]
    ways = ("The answer is \\boxed{%s}.", "#### %s", "Answer: %s", "<answer>%s</answer>", "%s")
    return [way.replace("%s", str(text)) for text in texts for way in ways]


@pytest.mark.parametrize("name", [*(name for name in PUBLISHED if name != "game24"), "countdown"])  # no solutions
def test_the_graders_take_what_the_recipes_make(name: str, tmp_path: Path, hub: list[Any]) -> None:
    if name == "countdown":
        pytest.importorskip("reasoning_gym")
    small = {"limit": 1, "test_size": 0} if find_recipe(name).generate else {}
    prepare(Request(find_recipe(name), **small), tmp_path)
    for file in tmp_path.glob("*.parquet"):
        (row,) = read_rows(file)
        answers = right_answers(row)
        results = [
            compute_score(row.data_source, text, row.ground_truth, row.extra_info)
            for text in (*answers, "I don't know.")
        ]
        scores = [r["score"] if isinstance(r, dict) else r for r in results]
        assert max(scores[:-1]) == 1.0 and scores[-1] <= 0.0, (row.ground_truth, scores)


def test_records_of_another_data_set_are_named() -> None:
    for name, record, words in (
        ("gsm8k", {"question": "?", "answer": "3"}, "no '####'"),
        ("gsm8k", {"problem": "?"}, "has no 'answer' (it has problem)"),
        ("math", {"problem": "?", "solution": "3"}, "no \\boxed"),
        ("math", {"problem": "?", "solution": "\\boxed{3"}, "ends inside"),
        ("mmlu", {"question": "?", "choices": ["a"], "answer": 1}, "none of its 1 choices"),
        ("hh_rlhf", {"prompt": "What?", "chosen": "a", "rejected": "b"}, "must begin with 'Human:'"),
        ("ultrafeedback", {"prompt": "?", "chosen": "a", "rejected": "b"}, "must be lists of messages"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            find_recipe(name).convert(record)
    with pytest.raises(UserError, match="did you mean gsm8k"):
        find_recipe("gsm8")
