"""Programs: the answer is code that has to pass tests."""

from __future__ import annotations

import json

from valor.data.recipes.recipe import QUESTION, Example, Record, published, text, value


def humaneval(record: Record) -> Example:
    """The beginning of a function; the tests call it by its name."""
    start = str(value(record, "prompt"))
    truth = {"prompt": start, "test": text(record, "test"), "entry_point": text(record, "entry_point")}
    extra = {"task_id": text(record, "task_id")}
    if record.get("canonical_solution"):
        extra["solution"] = start + str(record["canonical_solution"])
    return Example(f"```python\n{start.strip()}\n```", json.dumps(truth), extra)


def mbpp(record: Record) -> Example:
    """A task in words, and the assertions that the code has to pass; they name the function, so they are shown."""
    tests = list(value(record, "test_list"))
    setup = "\n".join([*(record.get("test_imports") or ()), str(record.get("test_setup_code") or "")]).strip()
    extra = {"task_id": str(value(record, "task_id"))} | ({"solution": record["code"]} if record.get("code") else {})
    question = f"{text(record, 'text', 'prompt')}\n\nThe code has to pass these tests:\n\n" + "\n".join(tests)
    return Example(question, json.dumps({"test_list": tests, "test_setup_code": setup}), extra)


RECIPES = (
    published(
        "humaneval",
        "HumanEval, 164 Python functions to complete",
        humaneval,
        "openai/openai_humaneval",
        train="",
        ability="code",
        columns=("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        template="Complete this Python function. Give the whole function in one ```python block.\n\n" + QUESTION,
    ),
    published(
        "mbpp",
        "MBPP, 374 + 500 short Python tasks with three tests each",
        mbpp,
        "google-research-datasets/mbpp",
        "full",
        ability="code",
        columns=("task_id", "text", "prompt", "code", "test_list", "test_setup_code", "test_imports"),
        template=QUESTION + "\n\nGive the code in one ```python block.",
    ),
)
