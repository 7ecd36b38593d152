"""How values, returns and advantages are spread over a run: shares by step, in bins common to all steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from valor.report.run_data import StepHistogram, evenly_spaced
from valor.tracking.histogram import Histogram

NUM_ROWS = 40
MAX_COLUMNS = 160
_TAIL = 0.005  # of all tokens, at either end: they are counted in the outermost bins, so that the rest is seen


PICTURES = {
    "values": ("critic", "Share of tokens by value."),
    "returns": ("critic", "What the critic is trained towards."),
    "advantages": ("policy", "Share of tokens by what the policy loss gets."),
}


def histogram_specs(histograms: Mapping[str, list[StepHistogram]]) -> list[dict[str, Any]]:
    """The pictures that the run has data for: `steps`, bin centres `rows`, and `shares` [row][step].

    Returns are shown beside values only.
    """
    specs = []
    for name, (section, note) in PICTURES.items():
        found = histograms.get(f"critic/{name}/histogram")
        if found and (name != "returns" or "critic/values/histogram" in histograms):
            head = {"id": f"{name}-spread", "section": section, "title": f"Spread of the {name}", "note": note}
            specs.append(head | _columns(found))
    return specs


def _columns(spreads: list[StepHistogram]) -> dict[str, Any]:
    shown = evenly_spaced(spreads, MAX_COLUMNS)
    low, high = _ends([one for _, one in shown])
    edges = np.linspace(low, high, NUM_ROWS + 1)
    shares = np.stack([_shares(one, edges) for _, one in shown], axis=1)
    return {
        "steps": [step for step, _ in shown],
        "rows": [float(f"{row:.4g}") for row in (edges[:-1] + edges[1:]) / 2],
        "shares": np.round(shares, 4).tolist(),
    }


def _ends(spreads: list[Histogram]) -> tuple[float, float]:
    """Where the run's entries begin and end, but for their tails."""
    centres = np.concatenate([one.centres for one in spreads])
    counts = np.concatenate([one.counts for one in spreads]).astype(float)
    order = np.argsort(centres)
    reached = np.cumsum(counts[order]) / counts.sum()
    low, high = (float(centres[order][np.searchsorted(reached, at)]) for at in (_TAIL, 1 - _TAIL))
    room = 0.02 * (high - low) or 0.5
    return low - room, high + room


def _shares(one: Histogram, edges: np.ndarray) -> np.ndarray:
    """The step's share of entries in each of the common bins; its own bins are spread evenly over what they cover."""
    reached = np.concatenate([[0.0], np.cumsum(one.counts)]) / sum(one.counts)
    inner = np.interp(edges[1:-1], one.edges, reached)
    return np.diff(np.concatenate([[0.0], inner, [1.0]]))
