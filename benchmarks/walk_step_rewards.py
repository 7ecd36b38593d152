"""A grader of walks that gives each door's gain at the door's own letter; their sum is the outcome."""

import json

from valor.rewards.walk import Walk
from valor.rewards.walk import grade as outcome


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = outcome(data_source, solution_str, ground_truth, extra_info)
    walk = Walk(**json.loads(ground_truth))
    steps, room = [], walk.start
    for door in range(walk.length if found["whole"] else 0):
        taken = ord(solution_str[2 * door]) - ord("a")
        steps.append(((2 * door, 2 * door + 1), walk.gains[room][taken] / walk.length))
        room = walk.leads[room][taken]
    return {**found, "score": 0.0, "step_rewards": steps}
