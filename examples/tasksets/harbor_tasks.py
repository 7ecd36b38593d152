"""Harbor tasks (https://harborframework.com/docs/tasks): task.toml, instruction.md, environment/, tests/test.sh.

valor ppo data.taskset=examples/tasksets/harbor_tasks.py:Harbor actor_rollout_ref.model.path=MODEL \\
    'data.taskset_kwargs={folder: examples/tasksets/harbor_examples, ignore_dockerfile: true}'

The policy has a tool `bash`; when it has ended, tests/test.sh writes the reward to /logs/verifier. Containers are not
started and Dockerfiles not built: commands run in `room.py`, with this machine's programs and without a
network. The files of environment/ are copied to its WORKDIR, and what is written outside that and /tmp is not kept.
"""

import json
import math
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from room import run_in_room, why_no_room

from valor.agents.env import Env
from valor.agents.tools import ToolResult
from valor.errors import UserError

_BUILT = ("environment/Dockerfile", "environment/docker-compose.yaml", "environment/docker-compose.yml")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE)
_VERIFIER_SECONDS = 600.0
_MOST_SECONDS = 3600.0  # of a command; the limit of a tool's call comes before
_GRACE = 5.0  # seconds beyond the verifier's own limit, in which its end is seen
_TAIL = 300  # characters of its output in an error


class Harbor(Env):
    """One attempt at a task, in a folder of its own that is deleted at its end."""

    tools = ("bash",)

    _root: Path | None = None

    @classmethod
    def rows(cls, folder: str, ignore_dockerfile: bool = False, reward_key: str = "reward") -> list[dict[str, Any]]:
        """The tasks at or below a folder, by their paths. `reward_key`: which value of reward.json is the reward.

        UserError: a task that cannot be played here, or no enclosure on this machine.
        """
        if (reason := why_no_room()) is not None:
            raise UserError(f"Harbor tasks need namespaces of Linux (unshare), which are not to be had here: {reason}")
        folders = sorted(file.parent for file in Path(folder).expanduser().resolve().rglob("task.toml"))
        if not folders:
            raise UserError(f"'{folder}' has no task.toml in or below it: Harbor tasks are folders with one")
        for path in folders:
            _check(path, ignore_dockerfile)
        return [
            {
                "prompt": [{"role": "user", "content": (path / "instruction.md").read_text(encoding="utf-8")}],
                "data_source": f"harbor/{path.name}",
                "reward_model": {"style": "model"},
                "extra_info": {"folder": str(path), "reward_key": reward_key},
            }
            for path in folders
        ]

    def reset(self, row: Mapping[str, Any]) -> None:
        self._task = task = _read(Path(row["extra_info"]["folder"]))
        self._key = row["extra_info"]["reward_key"]
        self._root = Path(tempfile.mkdtemp(prefix="valor-harbor-"))
        self.score_seconds = task.verifier_seconds + _GRACE
        self._folders = {task.workdir: self._root / "work", "/tmp": self._root / "tmp"}
        self._folders["/tmp"].mkdir()
        ignored = shutil.ignore_patterns(*(Path(name).name for name in _BUILT))
        if (files := task.folder / "environment").is_dir():
            shutil.copytree(files, self._folders[task.workdir], ignore=ignored)
        else:
            self._folders[task.workdir].mkdir()

    def bash(self, command: str) -> ToolResult:
        """Run a bash command. Answers what it prints, and its exit status if that is not 0.

        Args:
            command: The command.
        """
        task = self._task
        ended = run_in_room(command, self._folders, seconds=_MOST_SECONDS, memory_mb=task.memory_mb, env=task.env)
        status = f"\n(exit status {ended.status})" if ended.status else ""
        return ToolResult((ended.text.rstrip("\n") + status).lstrip("\n"))

    def score(self) -> float:
        """What the verifier writes. RuntimeError: nothing, or no number."""
        assert self._root is not None, "it is open"
        task, logs = self._task, self._root / "logs"  # which the policy has never seen
        logs.mkdir()
        ended = run_in_room(
            "bash /tests/test.sh",
            {**self._folders, "/logs/verifier": logs},
            seconds=task.verifier_seconds,
            memory_mb=task.memory_mb,
            env=task.verifier_env,
            read_only={"/tests": task.folder / "tests"},
        )
        try:
            name = next(name for name in ("reward.json", "reward.txt") if (logs / name).exists())
            if (logs / name).is_symlink():
                raise ValueError(f"{name} is a link")
            text = (logs / name).read_text(encoding="utf-8")
            reward = float(json.loads(text)[self._key] if name == "reward.json" else text)
            if math.isfinite(reward):
                return reward
            error: Exception = ValueError(f"the reward is {reward}")
        except StopIteration:
            error = FileNotFoundError("no reward.json or reward.txt")
        except (OSError, ValueError, LookupError, TypeError) as failure:
            error = failure
        said = "no end in time" if ended.status is None else ended.text.strip()[-_TAIL:]
        raise RuntimeError(f"tests/test.sh of {task.folder.name} gave no reward ({error}): {said}")

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)


@dataclass(frozen=True)
class _Task:
    """A task folder: where commands run, their memory and environment, and seconds and environment of its verifier."""

    folder: Path
    workdir: str
    memory_mb: int
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    verifier_seconds: float


def _read(folder: Path) -> _Task:
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    box, verifier, dockerfile = config.get("environment", {}), config.get("verifier", {}), folder / _BUILT[0]
    written = _WORKDIR.findall(dockerfile.read_text(encoding="utf-8")) if dockerfile.exists() else []
    return _Task(
        folder=folder,
        workdir=box.get("workdir") or (written[-1] if written else "/app"),
        memory_mb=int(box.get("memory_mb") or 2048),
        env={name: str(value) for name, value in box.get("env", {}).items()},
        verifier_env={name: str(value) for name, value in verifier.get("env", {}).items()},
        verifier_seconds=float(verifier.get("timeout_sec") or _VERIFIER_SECONDS),
    )


def _check(folder: Path, ignore_dockerfile: bool) -> None:
    """UserError: a file is missing, or something that the task needs is not to be had here."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / 'task.toml'}: {error}") from None
    box, verifier = config.get("environment", {}), config.get("verifier", {})
    built = [name for name in _BUILT if (folder / name).exists()]
    reasons = {
        "steps/ (a task of several steps)": (folder / "steps").is_dir(),
        "no instruction.md": not (folder / "instruction.md").is_file(),
        "no tests/test.sh": not (folder / "tests/test.sh").is_file(),
        "verifier.environment_mode=separate": verifier.get("environment_mode") == "separate",
        "verifier.collect": bool(verifier.get("collect")),
        **{f"environment.{name}": bool(box.get(name)) for name in ("mcp_servers", "healthcheck", "gpus")},
        f"{', '.join(built) or 'a docker_image'}: containers are not started. If this machine's programs are all that "
        "it needs, add ignore_dockerfile: true to data.taskset_kwargs": (
            bool(built or box.get("docker_image")) and not ignore_dockerfile
        ),
    }
    if reason := next((reason for reason, is_so in reasons.items() if is_so), None):
        raise UserError(f"{folder.name} cannot be played: it has {reason}")
