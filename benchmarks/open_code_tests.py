#!/usr/bin/env python3
"""How many rows of HumanEval and MBPP a response could pass without solving, if it may define what tests use.

    python benchmarks/open_code_tests.py --humaneval HumanEval.jsonl --mbpp mbpp.jsonl

The files are those of github.com/openai/human-eval (unpacked) and github.com/google-research/google-research. Printed
for each: rows whose tests use a name that neither they, the prompt nor Python define, beside the function that is asked
for; those of them where such a name has a part in the verdict (`assert allclose(f(2), 4)`), so that a response which
defines it would pass; rows that use a function of the prompt, which a response could define anew; rows that expect an
infinity or a nan; rows with an absolute tolerance of their own. Each row of the second kind is then graded with such a
response, which has to fail.
"""

import argparse
import ast
import builtins
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from valor.rewards.code import grade

# Called, or whatever of it is called, it says True.
FORGED = """
class {name}(metaclass=type("Yes", (type,), {{"__getattr__": lambda *a: lambda *b, **c: True}})):
    def __new__(*a, **k): return True
"""


def names(text: str) -> tuple[set[str], set[str]]:
    """The names that a text reads, and those that it defines."""
    nodes = list(ast.walk(ast.parse(text)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return read, defined


def deciding(tests: str, free: set[str], asked: str) -> set[str]:
    """Free names that an assertion uses otherwise than for arguments of the function that is asked for."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Name) and node.id in free:
            found.add(node.id)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == asked):
            for child in ast.iter_child_nodes(node):
                visit(child)

    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Assert):
            visit(node)
    return found


def humaneval(row: dict[str, Any]) -> tuple[str, str, str, Any]:
    """Function that is asked for, prompt, tests, ground truth."""
    return row["entry_point"], row["prompt"], row["test"].replace("candidate", row["entry_point"]), row


def mbpp(row: dict[str, Any]) -> tuple[str, str, str, Any]:
    """The same; the function is the first one that the tests call and the solution defines."""
    tests = "\n".join([row.get("test_setup_code") or "", *row["test_list"]])
    solution = names(row["code"])[1]
    calls = [node for text in row["test_list"] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    called = [node.func.id for node in calls if isinstance(node.func, ast.Name)]
    asked = next((name for name in called if name in solution and not hasattr(builtins, name)), "")
    return asked, "", tests, {"test_list": row["test_list"], "test_setup_code": row.get("test_setup_code")}


def count(name: str, file: Path, read: Any) -> None:
    """Print the counts of one file."""
    seen, passed = Counter[str](), 0
    for line in file.read_text().splitlines():
        asked, prompt, tests, truth = read(json.loads(line))
        used, defined = names(tests)
        helpers = names(prompt)[1] & used - {asked} if prompt else set()
        free = {n for n in used - defined - {asked} if not hasattr(builtins, n)} - helpers
        decide = deciding(tests, free, asked)
        seen["rows"] += 1
        seen["use a name of the response"] += bool(free)
        seen["such a name decides"] += bool(decide)
        seen["use a function of the prompt"] += any(defines_function(prompt, n) for n in helpers)
        seen["expect inf or nan"] += any(word in tests for word in ("'inf'", '"inf"', ".inf", "'nan'", ".nan"))
        seen["absolute tolerance"] += any(word in tests for word in ("abs(", "abs_tol", "atol", "isclose", "round("))
        if decide:
            forged = "\n".join(FORGED.format(name=one) for one in decide)
            response = f"```python\n{forged}\ndef {asked}(*a): return True\n```"
            passed += grade("mbpp", response, truth)["score"] == 1.0
    print(f"{name}: {', '.join(f'{what} {number}' for what, number in seen.items())}; forgeries that passed {passed}")


def defines_function(prompt: str, name: str) -> bool:
    """Whether the prompt defines a function of that name."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(ast.parse(prompt)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--mbpp", type=Path)
    args = parser.parse_args()
    for name, file, read in (("HumanEval", args.humaneval, humaneval), ("MBPP", args.mbpp, mbpp)):
        if file:
            count(name, file, read)
    return 0


if __name__ == "__main__":
    sys.exit(main())
