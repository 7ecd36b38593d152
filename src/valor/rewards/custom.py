"""A grader that users bring: a function in a file or a module (`reward.custom_reward_function`)."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from valor.errors import UserError
from valor.rewards.functions import unpickled
from valor.user_files import load_file

_MODULE = "pkg://"  # begins the path of a module
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


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

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names under which it gets a Sample's fields, in their order."""
        return _BATCH_ARGUMENTS if self.whole_batch else _ARGUMENTS

    def load(self) -> Callable[..., Any]:
        """The function, known to take compute_score's arguments. Sync or async.

        Raises UserError for a missing file, module or function, one that fails on import, and wrong arguments.
        """
        function = self._found()
        given = dict.fromkeys(self.arguments) | dict(self.kwargs)
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            raise UserError(
                f"{self.path}: {self.name}() cannot be called with {', '.join(f'{k}=' for k in given)} ({error}): it "
                f"must take {', '.join(self.arguments)} and the given reward_kwargs"
            ) from None
        except ValueError:  # a builtin or extension function without a signature: the first call will tell
            pass
        return function

    def _found(self) -> Callable[..., Any]:
        if self.path.endswith(".pkl"):
            return unpickled(self.path)
        if self.path.startswith(_MODULE):
            name = self.path.removeprefix(_MODULE)
            try:
                module = importlib.import_module(name)
            except Exception as error:
                raise UserError(f"module '{name}' cannot be imported ({type(error).__name__}: {error})") from error
        else:
            module = load_file(self.path, "reward.custom_reward_function.path")
        found = getattr(module, self.name, None)
        if not callable(found):
            known = [k for k, v in vars(module).items() if inspect.isfunction(v) and not k.startswith("_")]
            raise UserError(
                f"{self.path} has no function '{self.name}' (it has {', '.join(known) or 'none'}): "
                "set reward.custom_reward_function.name"
            )
        return found
