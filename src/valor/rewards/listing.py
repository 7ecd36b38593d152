"""`valor rewards list`: which grader scores which data_source, what its score means, and its components."""

from __future__ import annotations

import argparse
import inspect
import re

from valor.rewards.registry import BUILT_IN, Grader

_COMPONENTS = re.compile(r"Components?: (.*?)(?:\n\n|\Z)", re.DOTALL)


def describe(grader: Grader) -> tuple[str, list[str]]:
    """First line of the grader's docstring, and the names that its `Components:` list has in backticks."""
    text = inspect.getdoc(grader) or "(not documented)"
    listed = _COMPONENTS.search(text)
    # Names in brackets are explanations.
    names = re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", listed[1])) if listed else []
    return text.partition("\n\n")[0].replace("\n", " "), names


def listing() -> str:
    """Every built-in grader: its data sources (names and patterns), what it scores, its components."""
    sources: dict[Grader, list[str]] = {}
    for pattern, grader in BUILT_IN.items():
        sources.setdefault(grader, []).append(pattern)
    blocks = []
    for grader, patterns in sources.items():
        summary, names = describe(grader)
        blocks.append(f"{', '.join(patterns)}\n    {summary}\n    components: {', '.join(names) or 'none'}")
    return "\n\n".join(blocks)


def main(argv: list[str]) -> int:
    """Print the listing."""
    description = "Which grader scores which data_source (* stands for anything), what it scores, and its components."
    argparse.ArgumentParser(prog="valor rewards list", description=description).parse_args(argv)
    print(listing())
    return 0
