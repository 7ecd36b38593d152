"""A closed place for code that a model has written."""

from valor.sandbox.box import Limits, Outcome, Sandbox, SandboxError, Verdict
from valor.sandbox.levels import LEVELS, strongest_level, try_levels

__all__ = ["LEVELS", "Limits", "Outcome", "Sandbox", "SandboxError", "Verdict", "strongest_level", "try_levels"]
