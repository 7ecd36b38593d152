"""Roles as plain classes: actor, critic, reference, rollout. They know nothing of Ray; a marker says how to call."""
