"""A policy loss whose gradient is never finite."""

from valor import algorithms


@algorithms.register_policy_loss("broken")
def broken(*, inputs):
    return inputs.aggregate(inputs.log_probs * float("nan")), {}
