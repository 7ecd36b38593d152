"""A reward that grows along the answer: the share of its characters that are digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
