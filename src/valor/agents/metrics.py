"""What a batch's episodes did, as metrics."""

from __future__ import annotations

from typing import Any

from valor.data.batch import Batch
from valor.data.episodes import Episodes
from valor.tracking.metrics import summarize


def episode_metrics(batch: Batch) -> dict[str, Any]:
    """`episode/*` where agents play: turns, rows, tool calls and errors, seconds of tools, tokens by kind."""
    if "episode" not in batch:
        return {}
    rows = Episodes(batch).rows
    infos = [batch.objects["episode_info"][one[0]] for one in rows]
    own = batch["response_mask"].sum()
    count = max(len(rows), 1)
    ends = [batch.objects["finish_reason"][one[0]] for one in rows]
    out = {
        **summarize("episode/turns", batch["turn_ids"].amax(1)[[one[-1] for one in rows]].float()),
        "episode/rows": len(batch) / count,
        "episode/cut_off": sum(end in ("length", "turns") for end in ends) / count,
        "episode/failed": ends.count("abort") / count,
        "episode/policy_tokens": float(own) / count,
        "episode/observation_tokens": float(batch["response_lengths"].sum() - own) / count,
    }
    calls = [call for info in infos for call in info.get("calls", ())]
    out |= {
        "episode/tool_calls": len(calls) / count,
        "episode/tool_errors": sum(call["error"] is not None for call in calls) / count,
        "episode/tool_seconds": sum(call["seconds"] for call in calls) / count,
    }
    for kind in sorted({call["error"] for call in calls if call["error"] is not None}):
        out[f"episode/tool_errors/{kind}"] = sum(call["error"] == kind for call in calls) / count
    return out
