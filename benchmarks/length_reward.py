"""A reward that costs nothing to compute, for timing: the response's length in characters modulo 7."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(len(solution_str) % 7)
