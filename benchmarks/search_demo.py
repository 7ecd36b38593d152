#!/usr/bin/env python3
"""What `valor demo --task search` reaches with PPO and with GRPO, and what it takes: results/search_demo.md.

python benchmarks/search_demo.py                  # three seeds of each, one after the other, in runs/search_demo
python benchmarks/search_demo.py --table          # the table of the runs that are there
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from valor.lab.demo import ROLES, read_results

TABLE = Path(__file__).parent / "results" / "search_demo.md"
HEADER = """# Looking up what cannot be known: `valor demo --task search`

`python benchmarks/search_demo.py`: a 0.6M-parameter model, warm-started on a teacher who guesses in seven of ten
demonstrations. Accuracy is greedy, on 256 names that no other question has; the control is the trained policy with a
corpus that has no document about any of them: it searches, is told nothing, and answers all the same (one guess in 90
is right). Reward and searches are those of the samples of the first and of the last step (temperature 1). CPU seconds:
the whole demo, one thread, on a machine of 2 cores that had other work, too.

| algorithm | seed | accuracy | control | reward | searches an episode | steps | CPU seconds |
|---|---|---|---|---|---|---|---|
"""


def play(out: Path, algorithm: str, seed: int) -> None:
    """One demo in a process of its own; its CPU seconds in a file."""
    command = [sys.executable, "-m", "valor", "demo", "--task", "search", "--algorithm", algorithm]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "console.log").open("w") as log:
        process = subprocess.Popen([*command, "--seed", str(seed), "--out", str(out)], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the demo failed: {out / 'console.log'}")
    (out / "cpu.json").write_text(json.dumps(usage.ru_utime + usage.ru_stime))


def row(out: Path, algorithm: str, seed: int) -> str:
    """A line of the table."""
    before, after = read_results(out / algorithm)
    control, _ = read_results(out / f"{algorithm}_control")
    steps = sum('"critic/score/mean"' in line for line in (out / algorithm / "metrics.jsonl").read_text().splitlines())
    cells = [
        algorithm.upper(),
        str(seed),
        f"{before.validation:.3f} → {after.validation:.3f}",
        f"{control.validation:.3f}",
        f"{before.sampled:.3f} → {after.sampled:.3f}",
        f"{before.calls:.2f} → {after.calls:.2f}",
        str(steps),
        f"{json.loads((out / 'cpu.json').read_text()):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Play what has not been played, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/search_demo"))
    parser.add_argument("--algorithms", nargs="+", choices=list(ROLES), default=list(ROLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="play nothing")
    args = parser.parse_args()
    runs = [(args.out / f"{name}_{seed}", name, seed) for name in args.algorithms for seed in args.seeds]
    if not args.table:
        for run in runs:
            if not (run[0] / "cpu.json").exists():
                play(*run)
    done = [run for run in runs if (run[0] / "cpu.json").exists()]
    TABLE.write_text(HEADER + "\n".join(row(*run) for run in done) + "\n")


if __name__ == "__main__":
    main()
