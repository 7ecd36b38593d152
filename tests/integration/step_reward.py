"""A grader that gives something for the first character, and the outcome for an even sum."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    even = sum(map(ord, solution_str)) % 2 == 0
    steps = [((0, 1), 0.5 if solution_str[0].isdigit() else -0.5)] if solution_str else []
    return {"score": float(even), "step_rewards": steps}
