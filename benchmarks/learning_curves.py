#!/usr/bin/env python3
"""Does each estimator learn? Curves and table of the runs that examples/lab/estimators.yaml left.

    valor demo && valor lab sweep examples/lab/estimators.yaml && python benchmarks/learning_curves.py runs/estimators

docs/images/curves/<algorithm>.svg: mean reward of the samples drawn in training (temperature 1) by step, a thin line a
seed, a thick one for their mean. results/learning_table.md: greedy accuracy on problems that no other file holds.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

CURVES = Path(__file__).parents[1] / "docs" / "images" / "curves"
TABLE = Path(__file__).parent / "results" / "learning_table.md"
HEADER = """# Nine estimators on the arithmetic task of the demonstration

`valor lab sweep examples/lab/estimators.yaml`: a 0.6M-parameter model after the warm start of `valor demo`, 256 samples
and four updates a step; greedy accuracy on 256 problems kept apart, over seeds.

| algorithm | seeds | before | after, mean | after, range | least gain |
|---|---|---|---|---|---|
"""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 220, 44, 14, 12, 30


def rewards(run_dir: Path) -> list[float]:
    """Mean reward of each training step."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]


def row(arm: dict[str, Any]) -> str:
    """An arm's line of the table, from results.json."""
    runs = list(arm["finished"].values())
    before, after = ([run[key] for run in runs] for key in ("first", "last"))
    gain = min(run["last"] - run["first"] for run in runs)
    return (
        f"| {arm['name']} | {len(after)} | {fmean(before):.3f} | {fmean(after):.3f} | "
        f"{min(after):.3f} to {max(after):.3f} | {gain:+.3f} |"
    )


def picture(name: str, curves: list[list[float]]) -> str:
    """An SVG with the reward axis from 0 to 1."""
    steps = min(len(c) for c in curves)
    x_of = [LEFT + (WIDTH - LEFT - RIGHT) * i / max(steps - 1, 1) for i in range(steps)]

    def y_of(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)

    def line(values: list[float], width: float, colour: str) -> str:
        points = " ".join(f"{x:.1f},{y_of(v):.1f}" for x, v in zip(x_of, values, strict=True))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>'

    def text(x: float, y: float, words: str, anchor: str) -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11" fill="#555">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    parts += [line(c[:steps], 1, "#a9c0dd") for c in curves]
    mean = [sum(c[i] for c in curves) / len(curves) for i in range(steps)]
    parts.append(line(mean, 2.2, "#1f5fa8"))
    parts.append(text(LEFT, HEIGHT - 10, "step 1", "start"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 10, f"step {steps}", "end"))
    seeds = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 10, f"{name}: mean training reward, {seeds}", "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    arms = json.loads((Path(sys.argv[1]) / "results.json").read_text())["arms"]
    arms = [arm for arm in arms if arm["finished"]]
    CURVES.mkdir(parents=True, exist_ok=True)
    for arm in arms:
        runs = [Path(sys.argv[1], arm["name"], f"seed_{seed}") for seed in arm["finished"]]
        (CURVES / f"{arm['name']}.svg").write_text(picture(arm["name"], [rewards(run) for run in runs]))
    TABLE.write_text(HEADER + "\n".join(map(row, arms)) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
