"""Task sets: prompts, tools and reward of tasks that others wrote, by one name (`data.taskset`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from valor.agents.env import Env, Methods, find_env
from valor.config import PPOConfig
from valor.errors import UserError
from valor.user_files import load_object

_KEY = "data.taskset"
_KINDS = "file.py:Class of an Env with rows()"


class Taskset(NamedTuple):
    """`rows`: records with the columns of prompt files. `make`: the environment of an episode, which finds its task by
    the row's `extra_info.task`, the number in `rows`."""

    rows: Sequence[Mapping[str, Any]]
    make: Callable[[], Env]


def env_of_run(config: PPOConfig) -> Callable[[], Env] | None:
    """The constructor of the environments of a run; None: it has tools alone."""
    data, agent = config.data, config.actor_rollout_ref.rollout.agent
    if data.taskset is not None:
        return taskset_of_run(config).make
    return None if agent.environment is None else find_env(agent.environment, agent.environment_kwargs)


def taskset_of_run(config: PPOConfig) -> Taskset:
    """The task set of `data.taskset`, loaded once a process. UserError: there is none, or it cannot be played."""
    data = config.data
    assert data.taskset is not None
    most = data.train_max_samples + data.val_tasks if data.train_max_samples > 0 else None
    return _load(data.taskset, json.dumps(data.taskset_kwargs, sort_keys=True), most)


@cache
def _load(name: str, kwargs_json: str, most: int | None) -> Taskset:
    kwargs = json.loads(kwargs_json)
    try:
        if Path(name).is_dir():
            raise UserError("is a folder: for Harbor tasks set data.taskset=examples/tasksets/harbor_tasks.py:Harbor")
        if ":" not in name:
            raise UserError(
                f"is no task set: give {_KINDS}; for one of verifiers set "
                f"data.taskset=examples/tasksets/verifiers_tasks.py:Verifiers 'data.taskset_kwargs={{name: {name}}}'"
            )
        cls: Any = load_object(name, _KEY)
        if not callable(getattr(cls, "rows", None)):
            raise UserError(f"is no task set: give {_KINDS}")
        rows = list(cls.rows(**kwargs))
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(_KEY) else f"{_KEY}={name}: {message}") from None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{_KEY}={name} with taskset_kwargs={kwargs} cannot be loaded ({reason})") from error
    if not rows:
        raise UserError(f"{_KEY}={name}: it has no tasks")
    numbered = [{**row, "extra_info": {**(row.get("extra_info") or {}), "task": i}} for i, row in enumerate(rows)]
    return Taskset(numbered[:most], lambda: cls() if issubclass(cls, Env) else Methods(cls, {}))
