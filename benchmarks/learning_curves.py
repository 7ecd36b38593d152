#!/usr/bin/env python3
"""The curves of the runs that examples/lab/estimators.yaml left: docs/images/curves/<algorithm>.svg.

    valor lab sweep examples/lab/estimators.yaml && python benchmarks/learning_curves.py runs/estimators

Mean reward of the samples drawn in training (temperature 1) by step: a thin line a seed, a thick one for their mean.
"""

import json
import sys
from pathlib import Path

CURVES = Path(__file__).parents[1] / "docs" / "images" / "curves"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 220, 44, 14, 12, 30


def rewards(run_dir: Path) -> list[float]:
    """Mean reward of each training step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]


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
    results = json.loads((Path(sys.argv[1]) / "results.json").read_text())
    CURVES.mkdir(parents=True, exist_ok=True)
    for arm in results["arms"]:
        name, finished = arm["name"], [Path(sys.argv[1], arm["name"], f"seed_{seed}") for seed in arm["finished"]]
        if finished:
            (CURVES / f"{name}.svg").write_text(picture(name, [rewards(d) for d in finished]))
            print(CURVES / f"{name}.svg", len(finished))


if __name__ == "__main__":
    main()
