"""A reward function that fails on answers of an odd length, or on all, as `reward_kwargs.always` says."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, always=False):
    if always or len(solution_str) % 2:
        raise ValueError("the grader is broken")
    return 1.0
