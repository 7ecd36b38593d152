"""Where roles run: in this process or on a Ray cluster, with one calling convention.

group = start_group(pool, specs, controller="local" | "ray")
batch = group["actor"].compute_log_probs(batch)      # split over ranks, run, concatenated in the same row order
"""
