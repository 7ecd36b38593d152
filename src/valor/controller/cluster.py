"""`valor cluster`: the nodes that Ray sees, and what is free on them."""

from __future__ import annotations

import argparse
import logging

from valor.errors import UserError


def main(argv: list[str]) -> int:
    """Print one line a node."""
    parser = argparse.ArgumentParser(prog="valor cluster", description="The nodes that Ray sees.")
    parser.add_argument("--address", default="auto", help="host:port of the head; auto finds the one on this machine")
    args = parser.parse_args(argv)
    import ray

    try:
        ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"no Ray cluster at {args.address}: {reason}; `ray start --head` starts one") from None
    try:
        print(table(ray.nodes()))
    finally:
        ray.shutdown()
    return 0


def table(nodes: list[dict]) -> str:
    """Address, state, CPUs, GPUs and memory of each node, living ones first, and their sums."""
    rows = [("node", "state", "CPUs", "GPUs", "memory")]
    living = [node for node in nodes if node["Alive"]]
    for node in [*living, *(node for node in nodes if not node["Alive"])]:
        rows.append((node["NodeManagerAddress"], "alive" if node["Alive"] else "dead", *_amounts([node])))
    rows.append((f"{len(living)} alive", "", *_amounts(living)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _amounts(nodes: list[dict]) -> tuple[str, str, str]:
    total = {kind: sum(node["Resources"].get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU", "memory")}
    return f"{total['CPU']:g}", f"{total['GPU']:g}", f"{total['memory'] / 2**30:.1f} GiB"
