#!/usr/bin/env python3
"""Is a critic worth something as a reward? examples/lab/two_stage.yaml, its table and page kept in results/two_stage.

    valor demo && python benchmarks/two_stage.py [--parallel 2] [--out runs/two_stage] [any option of valor lab sweep]

Starting it again goes on where it stopped.
"""

import shutil
import sys
from pathlib import Path

from valor.cli import main

RESULTS = Path(__file__).parent / "results" / "two_stage"


def run(arguments: list[str]) -> int:
    out = Path(arguments[arguments.index("--out") + 1] if "--out" in arguments else "runs/two_stage")
    code = main(["lab", "sweep", "examples/lab/two_stage.yaml", *arguments])
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in ("table.md", "report.html"):
        shutil.copy(out / name, RESULTS / name)
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
