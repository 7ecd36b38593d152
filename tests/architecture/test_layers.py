"""The rooms of the house: a room imports only from lower floors, and heavy packages stay in their own file."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "valor"

_spec = importlib.util.spec_from_file_location("house", Path(__file__).parents[2] / "benchmarks" / "house.py")
house = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(house)
HOUSE = house.House(SOURCE.parent)

# Floor of each room; a room may import from its own floor only within itself.
FLOORS = {
    "errors": 0,
    "hub": 0,
    "machine": 0,
    "user_files": 1,
    "http_client": 1,
    "arguments": 1,
    "algorithms": 2,
    "config": 2,
    "sandbox": 2,
    "tracking": 2,
    "report": 3,
    "data": 3,
    "rewards": 3,
    "models": 4,
    "engines": 5,
    "rollout": 5,
    "agents": 6,
    "workers": 7,
    "controller": 8,
    "collector": 9,
    "trainer": 10,
    "lab": 11,
    "cli": 12,
    "__main__": 13,
}
# Packages that only these rooms may import.
ONLY_IN = {
    "ray": {"controller"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "wandb": {"tracking"},
    "plotly": {"report"},
    "vllm": {"rollout"},
    "numba": {"rollout"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of everything `path` imports, in functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.add(node.module or "")
            if node.module == "valor":
                found |= {f"valor.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
    return found


FILES = sorted(p for p in SOURCE.rglob("*.py") if p.name != "__init__.py" or p.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "valor" and len(parts) > 1:
            other = parts[1]
            assert other == room or FLOORS[other] < FLOORS[room], f"{room} (floor {FLOORS[room]}) imports {name}"
        if parts[0] in ONLY_IN:
            assert room in ONLY_IN[parts[0]], f"{parts[0]} is imported in {room}, not only in {ONLY_IN[parts[0]]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


def test_no_circle_of_imports_also_inside_a_room_and_inside_functions():
    assert HOUSE.circles() == 0


def test_the_pages_that_the_code_writes_are_up_to_date():
    remedy = "run: python benchmarks/house.py --write"
    for page, text in house.pages(HOUSE).items():
        assert page.read_text() == text, remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("valor", ["torch", "ray", "transformers"]),
        ("valor.config", ["torch", "ray", "transformers"]),
        ("valor.rewards", ["torch", "ray", "transformers"]),
        ("valor.algorithms", ["ray", "transformers", "hydra"]),
        ("valor.cli", ["torch", "ray", "transformers", "PIL"]),
        ("valor.data.prompts", ["PIL"]),
        ("valor.trainer.dry_run", ["ray", "vllm", "peft"]),
    ],
)
def test_importing_a_room_stays_light(module, unwanted):
    code = f"import sys, {module}; print([m for m in {unwanted!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
