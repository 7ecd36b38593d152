"""A grader that users bring: a function in a file or a module (`reward.custom_reward_function`)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from valor.errors import UserError
from valor.rewards.functions import TRANSCRIPT, RewardFunctions, fields_for, takes_lists
from valor.user_files import load_object, unpickled

_MODULE = "pkg://"  # begins the path of a module


@dataclass(frozen=True)
class CustomFunction:
    """`reward.custom_reward_function`: a function that grades, where to find it, and extra keywords for it.

    `path` is a Python file, `pkg://package.module`, or a .pkl that a Python session wrote. `whole_batch`: it takes
    lists, one entry a sample, and returns a list of what is otherwise returned for one.
    """

    path: str
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    whole_batch: bool = False

    def arguments(self, function: Callable[..., Any]) -> dict[str, str]:
        """The fields of a Sample that the function gets, and the names of its arguments for them."""
        plural = "s" * self.whole_batch
        names = {field: field + plural for field in fields_for(function)}
        return {field: name for field, name in names.items() if field != TRANSCRIPT or name not in self.kwargs}

    def load(self, *, stays: bool = True) -> Callable[..., Any]:
        """The function, known to take compute_score's arguments. Sync or async. `stays` as in `user_files.load_file`.

        Raises UserError for a missing file, module or function, one that fails on import, and wrong arguments.
        """
        if self.path.endswith(".pkl"):
            function = unpickled(self.path)
        else:
            key = "reward.custom_reward_function (path, name)"
            name = f"{self.path.removeprefix(_MODULE)}:{self.name}"
            function = self._of_columns(load_object(name, key, stays=stays))
        if takes_lists(function) and not self.whole_batch:
            raise UserError(
                f"{self.path}: the function takes lists (solution_strs) of a step's samples: set "
                "reward.reward_manager.name=batch"
            )
        names = self.arguments(function).values()
        arguments = dict.fromkeys(names) | dict(self.kwargs)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise UserError(
                f"{self.path}: {self.name}() cannot be called with {', '.join(f'{k}=' for k in arguments)} ({error}): "
                f"it must take {', '.join(names)} and the reward_kwargs"
                f"{'; what environments know, their get_reward() returns' * ('environments' in str(error))}"
            ) from None
        except ValueError:  # a builtin or extension function without a signature: the first call will tell
            pass
        return function

    def _of_columns(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function in TRL's form as one of samples, others as they are. UserError: it needs what files lack."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return function
        if "completions" not in parameters or takes_lists(function):
            return function
        if self.kwargs or "prompts" in parameters:
            lacking = "reward_kwargs are" if self.kwargs else "prompts are"
            raise UserError(
                f"{self.path}: {self.name}() takes completions, to which no {lacking} passed: leave them out"
            )
        return RewardFunctions([function])
