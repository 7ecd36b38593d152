"""The size and the shape of the package, room by room: what `docs/architecture.md` shows, and what a refactoring moved.

python benchmarks/house.py                     # a table of this checkout
python benchmarks/house.py --before OTHER/src  # beside another one's
python benchmarks/house.py --write             # the parts of docs/ that are drawn from the code
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
DOCS = Path(__file__).parents[1] / "docs"


class House:
    """The package below `source`/valor; a room is a folder of it, or a file beside the folders."""

    def __init__(self, source: Path) -> None:
        self.root = source / "valor"
        self.files = sorted(self.root.rglob("*.py"))
        self.modules = {self.module(path): path for path in self.files}

    def module(self, path: Path) -> str:
        return ".".join(("valor", *path.relative_to(self.root).with_suffix("").parts)).removesuffix(".__init__")

    def room(self, path: Path) -> str:
        return path.relative_to(self.root).parts[0].removesuffix(".py")

    def rooms(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = defaultdict(list)
        for path in self.files:
            found[self.room(path)].append(path)
        return dict(found)

    def imports(self, path: Path) -> set[str]:
        """Modules of the package that a file imports, inside functions too."""
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in self.modules else str(node.module) for name in names}
        return {name for name in found if name in self.modules} - {self.module(path)}

    def circles(self) -> int:
        """Groups of modules that import each other (strongly connected, more than one module)."""
        edges = {name: self.imports(path) for name, path in self.modules.items()}
        reach: dict[str, set[str]] = {}
        for start in edges:
            seen, todo = set(), [start]
            while todo:
                for other in edges[todo.pop()] - seen:
                    seen.add(other)
                    todo.append(other)
            reach[start] = seen
        return len({frozenset(b for b in reach[a] if a in reach[b]) for a in edges if a in reach[a]})

    def room_imports(self) -> dict[str, set[str]]:
        found = {room: set() for room in self.rooms()}
        for path in self.files:
            here = self.room(path)
            found[here] |= {self.room(self.modules[name]) for name in self.imports(path)} - {here, "__init__"}
        return found


def lines_of(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def longest_function(paths: list[Path]) -> int:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions))
    return max((node.end_lineno - node.lineno + 1 for node in nodes), default=0)  # type: ignore[operator]


def table(house: House, before: House | None) -> str:
    """Lines, files and the longest function of each room, as Markdown."""
    old, new = before.rooms() if before else {}, house.rooms()
    rows = []
    for room in sorted({*old, *new} - {"__init__", "__main__"}):
        cells = [f"`{room}`"]
        for paths in ([old.get(room, [])] if before else []) + [new.get(room, [])]:
            cells += [f"{lines_of(paths):,}", str(len(paths)), str(longest_function(paths))] if paths else ["", "", ""]
        rows.append(cells)
    total = ["all"]
    for one in [before, house] if before else [house]:
        total += [f"{lines_of(one.files):,}", str(len(one.files)), str(longest_function(one.files))]
    names = ["lines", "files", "longest function"]
    head = ["room", *(f"{name} before" for name in names), *(f"{name} after" for name in names)]
    head = head if before else ["room", *names]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows, total]
    circles = f"circles of imports: {before.circles()} before, " if before else "circles of imports: "
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{circles}{house.circles()}"


def picture(house: House) -> str:
    """Rooms from the ground up; an arrow for each import that no chain of other arrows implies."""
    edges = {room: set(others) for room, others in house.room_imports().items() if room not in _PLUMBING}
    edges = {room: others - _PLUMBING for room, others in edges.items()}
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return f"rooms in a circle: {' -> '.join(error.args[1])}"
    below: dict[str, set[str]] = {}
    for room in order:
        below[room] = set().union(*({other, *below[other]} for other in edges.get(room, ())))
    lines = ["graph BT"]
    for room in sorted(edges):
        direct = {o for o in edges[room] if not any(o in below[other] for other in edges[room])}
        lines += [f"    {room} --> {other}" for other in sorted(direct)]
    return "\n".join(lines)


def file_map(house: House) -> str:
    """A line for every file: the first sentence of its docstring."""
    lines = [
        "# A line for every file",
        "",
        "Written by `python benchmarks/house.py --write` from the files' docstrings.",
    ]
    for room, paths in house.rooms().items():
        lines += ["", f"## `{room}`" if len(paths) > 1 else "", ""]
        for path in paths:
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            name = path.relative_to(house.root)
            if docstring and (path.name != "__init__.py" or len(docstring.splitlines()) > 1 or len(paths) > 1):
                lines.append(f"* [`{name}`](../src/valor/{name}): {' '.join(docstring.split(chr(10) * 2)[0].split())}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def run_phases(preset: str) -> list[Any]:
    """The phases of a run that starts from this preset and sets nothing else."""
    from valor.config import PPOConfig, load
    from valor.trainer.phases.standard import phases_of

    return list(phases_of(load([f"--config-name={preset}"], PPOConfig).config))


def phase_picture(phases: list[Any]) -> str:
    """Who reads which phase's columns, as a Mermaid graph; collected columns are left out, and implied arrows."""
    sources: dict[str, set[str]] = {}  # by phase: the phases whose columns it reads
    adders: dict[str, str] = {}  # by column: the last phase that added it
    lines = ["graph LR", "    next_batch([next_batch])"]
    for phase in phases:
        columns = (phase.reads | phase.reads_if_there) & adders.keys()
        direct = {adders[column] for column in columns}
        implied = set().union(*(sources[name] for name in direct)) if direct else set()
        sources[phase.name] = direct | implied
        where = phase.role or "driver"
        lines.append(f"    {phase.name}[{phase.name}<br/><i>{where}</i>]")
        lines += [f"    {name} --> {phase.name}" for name in sorted(direct - implied)] or [
            f"    next_batch --> {phase.name}"
        ]
        adders |= dict.fromkeys(phase.adds, phase.name)
    return "\n".join(lines)


def phase_table() -> str:
    """Every phase of the standard list: where it runs, its columns, and which of two presets has it."""
    from valor.trainer.phases.base import COLLECTED
    from valor.trainer.phases.standard import STANDARD

    runs = {preset: {phase.name: phase for phase in run_phases(preset)} for preset in ("ppo_config", "grpo_config")}
    config = next(iter(runs["ppo_config"].values())).config
    lines = ["| phase | where | reads of other phases | adds | PPO | GRPO | |", "|---|---|---|---|---|---|---|"]
    for kind in STANDARD:
        having = [run.get(kind.name) for run in runs.values()]
        phase = next((phase for phase in having if type(phase) is kind), None) or kind(config)
        reads, adds = (
            ", ".join(f"`{column}`" for column in sorted(columns - {"*", *COLLECTED}))
            for columns in (phase.reads, phase.adds | (phase.adds & COLLECTED))
        )
        summary = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        marks = " | ".join("yes" if type(other) is kind else "" for other in having)
        lines.append(f"| `{kind.name}` | {kind.role or 'driver'} | {reads} | {adds} | {marks} | {summary} |")
    return "\n".join(lines)


def with_block(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of the block `name`."""
    block = f"<!-- {name} -->\n{text}\n<!-- /{name} -->"
    return re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, page, flags=re.S)


def pages(house: House) -> dict[Path, str]:
    """Pages with parts that are drawn from the code, as they should be."""
    architecture = (DOCS / "architecture.md").read_text()
    for name, drawing in {"rooms": picture(house), "phases": phase_picture(run_phases("ppo_config"))}.items():
        architecture = with_block(architecture, name, f"```mermaid\n{drawing}\n```")
    return {
        DOCS / "map.md": file_map(house),
        DOCS / "architecture.md": architecture,
        DOCS / "phases.md": with_block((DOCS / "phases.md").read_text(), "phases", phase_table()),
    }


_PLUMBING = {"__init__", "__main__", "errors", "machine", "user_files"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    parser.add_argument("--write", action="store_true", help="bring the three pages up to date")
    args = parser.parse_args()
    house = House(SOURCE)
    if args.write:
        for page, text in pages(house).items():
            page.write_text(text)
        return
    print(table(house, House(args.before) if args.before else None))


if __name__ == "__main__":
    main()
