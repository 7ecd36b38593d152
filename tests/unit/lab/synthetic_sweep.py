"""Folders as a sweep's runs leave them, with curves that are made up, for tests of what is made of them."""

import json
import random
from pathlib import Path

from valor.lab.sweep_plan import Sweep, SweepConfig, plan_sweep


def make_sweep(
    out: Path, arms: dict[str, float], seeds: tuple[int, ...] = (0, 1, 2), key: str = "algorithm.lam", **keys
) -> Sweep:
    """Every run finished: validation from 0.3 at step 0 to the arm's number at step 20, with a little noise a seed."""
    sweep = plan_sweep(
        SweepConfig.model_validate(
            {
                "name": "lambdas",
                "base": {"data": {"train_files": "t.parquet", "val_files": "v.parquet"}},
                "arms": {name: {key: round(0.01 * i + 0.1, 2)} for i, name in enumerate(arms)},
                "seeds": list(seeds),
                "out": str(out),
            }
            | keys
        )
    )
    for run in sweep.runs:
        noise = random.Random(f"{run.arm} {run.seed}")
        finish(run, [0.3 + (arms[run.arm] - 0.3) * step / 20 + noise.uniform(-0.02, 0.02) for step in range(0, 21, 5)])
    return sweep


def finish(run, validation: list[float]) -> None:
    """`validation` at steps 0, 5, 10, …; a training reward in every step but the first."""
    run.write("finished")
    rows = []
    for step in range(5 * len(validation) - 4):
        row: dict[str, float] = {"step": step}
        if step:
            row |= {"critic/score/mean": 0.2 + 0.03 * step, "timing_s/step": 2.0}
        if step % 5 == 0:
            row |= {"val-core/valor/arithmetic/reward/mean@1": validation[step // 5], "timing_s/testing": 0.5}
        rows.append(json.dumps(row) + "\n")
    (run.folder / "metrics.jsonl").write_text("".join(rows))
