"""A reward that an untrained model earns about every other time: 1 for a response with an even number of characters."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2 == 0)
