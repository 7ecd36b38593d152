"""Scores that differ within a prompt from the first step on, with named components."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    even = sum(map(ord, solution_str)) % 2 == 0
    return {"score": float(even), "short": float(len(solution_str) < 8), "digits": sum(map(str.isdigit, solution_str))}
