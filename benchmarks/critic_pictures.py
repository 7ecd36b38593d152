#!/usr/bin/env python3
"""The pictures of docs/value_lab.md, from tables of results/.

python benchmarks/critic_pictures.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
IMAGES = Path(__file__).parents[1] / "docs" / "images" / "critics"
COLOURS = ("#1f5fa8", "#c2571a", "#2e8540", "#8a3ffc", "#b01657", "#7a6000")
COLOURS += ("#008080", "#555555", "#d08b00", "#4b0082", "#e7298a")
Number = tuple[float, float, float]  # mean and interval
WIDTH, TOP, BOTTOM = 680, 34, 40


def tables(page: str, block: str) -> list[list[list[str]]]:
    """The tables between a page's comments of that name: lines of cells, the head first."""
    text = (RESULTS / page).read_text().partition(f"<!-- {block} -->\n")[2].partition(f"<!-- /{block} -->")[0]
    found = []
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in part.splitlines() if "|" in line]
        if lines:
            found.append([line for line in lines if not set("".join(line)) <= set("-: ")])
    return found


def number(cell: str) -> Number:
    """`0.1 (0.0 to 0.2)`, or a mean alone."""
    mean, *interval = (float(one) for one in re.findall(r"-?\d+\.\d+", cell))
    low, high = interval or (mean, mean)
    return mean, low, high


class Picture:
    """An SVG with a title and horizontal or vertical guides."""

    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
            'font-size="12" fill="#444">',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            f'<text x="10" y="20" font-size="13" font-weight="bold">{title}</text>',
        ]

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "#e5e5e5", width: float = 1) -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {ends} stroke="{colour}" stroke-width="{width}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", colour: str = "#444") -> None:
        safe = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{safe}</text>')

    def save(self, name: str) -> None:
        IMAGES.mkdir(parents=True, exist_ok=True)
        (IMAGES / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def ticks(low: float, high: float) -> list[float]:
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if (high - low) / s <= 6.5)
    first = int(low // step) + (low % step > 1e-9)
    return [round(step * i, 6) for i in range(first, int(high / step + 1e-9) + 1)]


def intervals(name: str, title: str, groups: dict[str, Sequence[tuple[str, Number]]], axis: str) -> None:
    """A dot with its interval a line; groups one below the other."""
    left, row = 250, 18
    rows = sum(len(some) + 1 for some in groups.values())
    picture = Picture(title, TOP + rows * row + BOTTOM)
    every = [value for some in groups.values() for _, (_, *ends) in some for value in ends] + [0.0]
    low, high = min(every), max(every)
    low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
    below = TOP + rows * row

    def x_of(value: float) -> float:
        return left + (WIDTH - left - 20) * (value - low) / (high - low)

    for tick in ticks(low, high):
        picture.line(x_of(tick), TOP, x_of(tick), below, "#999" if tick == 0 else "#e5e5e5")
        picture.text(x_of(tick), below + 15, f"{tick:g}", "middle")
    picture.text((left + WIDTH) / 2, below + 32, axis, "middle")
    y = TOP + 12
    for (group, some), colour in zip(groups.items(), COLOURS, strict=False):
        picture.text(10, y, group, colour=colour)
        for label, (mean, start, end) in some:
            y += row
            picture.text(left - 10, y, label, "end")
            picture.line(x_of(start), y - 4, x_of(end), y - 4, colour, 2)
            picture.dot(x_of(mean), y - 4, colour)
        y += row
    picture.save(name)


def curves(
    name: str,
    title: str,
    series: dict[str, Sequence[tuple[float, Number]]],
    axis: str,
    x_scale: Callable[[float], float] = lambda x: x,
    flat: Sequence[tuple[str, float]] = (),
) -> None:
    """A line for each series with bars for its intervals; `flat`: dashed levels without an x. Names at the right."""
    left, right, height = 50, 190, 300
    picture = Picture(title, height)
    places = sorted({x for line in series.values() for x, _ in line})
    every = [value for line in series.values() for _, ends in line for value in ends] + [value for _, value in flat]
    low, high = min(every), max(every)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def x_of(x: float) -> float:
        first, last = x_scale(places[0]), x_scale(places[-1])
        return left + 10 + (WIDTH - left - right - 20) * (x_scale(x) - first) / (last - first)

    def y_of(value: float) -> float:
        return TOP + (height - TOP - BOTTOM) * (1 - (value - low) / (high - low))

    for tick in ticks(low, high):
        picture.line(left, y_of(tick), WIDTH - right, y_of(tick), "#999" if tick == 0 else "#e5e5e5")
        picture.text(left - 6, y_of(tick) + 4, f"{tick:g}", "end")
    for x in places:
        picture.text(x_of(x), height - 24, f"{x:g}", "middle")
    picture.text((left + WIDTH - right) / 2, height - 8, axis, "middle")
    labels = []
    for (label, line), colour in zip(series.items(), COLOURS * 2, strict=False):
        for (x1, (a, *_)), (x2, (b, *_)) in pairwise(line):
            picture.line(x_of(x1), y_of(a), x_of(x2), y_of(b), colour, 1.8)
        for x, (mean, start, end) in line:
            picture.line(x_of(x), y_of(start), x_of(x), y_of(end), colour, 0.5)
            picture.dot(x_of(x), y_of(mean), colour)
        labels.append((y_of(line[-1][1][0]), label, colour))
    for label, value in flat:
        for x in range(left, WIDTH - right, 10):
            picture.line(x, y_of(value), x + 5, y_of(value), "#777", 1.2)
        labels.append((y_of(value), label, "#777"))
    labels.sort()
    y = 0.0
    free = max(0.0, TOP + 15.0 * len(labels) - height)
    for wanted, label, colour in labels:
        y = max(wanted - free, y + 15)
        picture.text(WIDTH - right + 8, y + 4, label, colour=colour)
    picture.save(name)


def main() -> None:
    truth = tables("critic_truth.md", "tables")[0]
    steps = [float(head.removeprefix("step ")) for head in truth[0][1:]]
    kinds = {line[0]: list(zip(steps, map(number, line[1:]), strict=True)) for line in truth[1:]}
    curves("truth", "How much of the true value does a critic explain?", kinds, "PPO step")

    luck = tables("luck.md", "table")[0][1:]
    held, free = (tables("which_critic.md", block)[0][1:] for block in ("0.5", "0.5 without KL"))
    arms = {"luck that the state shows": [(line[0], number(line[1])) for line in luck]}
    arms["noisy walks"] = [(f"{line[0]}, KL loss", number(line[2])) for line in held]
    arms["noisy walks"] += [(line[0], number(line[2])) for line in free]
    intervals("arms", "With a critic and without, at equal tokens", arms, "right choices; share of the way to the best")

    lines = tables("critic_study.md", "missing 8")[0][1:]
    missing = {"8 doors": [(line[0], number(line[1])) for line in lines]}
    intervals("missing", "Rewards taken away, a frozen critic beside", missing, "share of the way to the best walks")

    search = tables("critic_search.md", "table")[0][1:]
    found: dict[str, list[tuple[float, Number]]] = {}
    for method, n, accuracy, interval, *_ in search:
        low, _, high = interval.partition(" to ")
        if not method.startswith("tree"):
            found.setdefault(method, []).append((float(n), (float(accuracy), float(low), float(high))))
    curves("search", "Choosing among N answers: accuracy", found, "N answers", log)


if __name__ == "__main__":
    main()
