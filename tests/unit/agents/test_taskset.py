"""Task sets of others: rows, tools, stops and rewards of verifiers' own classes, Harbor's folders, an Env of ours."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from valor.agents.chat import Chat
from valor.agents.env_loop import EnvLoop
from valor.agents.episode import Episode, EpisodeFailed
from valor.agents.loops import Limits, LoopContext, Task
from valor.agents.taskset import taskset_of_run
from valor.config import load
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Output, SamplingParams, Span
from valor.user_files import load_file

EXAMPLES = Path(__file__).parents[3] / "examples/tasksets"


def verifiers(name: str) -> list[str]:
    return [f"data.taskset={EXAMPLES}/verifiers_tasks.py:Verifiers", f"data.taskset_kwargs={{name: '{name}'}}"]


CAPITALS = verifiers(f"{EXAMPLES}/capitals.py:CapitalsTaskset")
HARBOR = [
    f"data.taskset={EXAMPLES}/harbor_tasks.py:Harbor",
    f"data.taskset_kwargs={{folder: {EXAMPLES}/harbor_examples, ignore_dockerfile: true}}",
]
ROOM = load_file(f"{EXAMPLES}/room.py", "test")

MULTI = "actor_rollout_ref.rollout.multi_turn"
OWN = """
from valor.agents import Env

class Echo(Env):
    @classmethod
    def rows(cls, words):
        return [{"prompt": [{"role": "user", "content": w}], "data_source": "echo", "reward_model": {},
                 "extra_info": {"word": w}} for w in words]

    def reset(self, row):
        self.word, self.said = row["extra_info"]["word"], ""

    def heard(self, text):
        self.said = text

    def score(self):
        return float(self.said == self.word)
"""


def play(overrides: Sequence[str], number: int, *texts: str) -> tuple[Episode, list[str]]:
    """The episode of a task in which the policy says these texts, and the prompts that it was given."""
    config = load([*overrides, f"{MULTI}.tool_timeout=5"]).config
    loop = EnvLoop(LoopContext(config, Chat(make_tokenizer()), Limits(2000, 4000)))
    assert loop.grades
    record, prompts = taskset_of_run(config).rows[number], list[str]()

    async def generate(prompt_ids: Sequence[int], params: SamplingParams, seed: Any) -> Output:
        prompts.append(loop.chat.decode(prompt_ids))
        ids = [*loop.chat.ids(texts[len(prompts) - 1]), loop.chat.tokenizer.eos_token_id]
        return Output("", ids, [-1.0] * len(ids), "stop", (Span(len(ids), 0),))

    row = {**record, "messages": record["prompt"], "ground_truth": None, "uid": f"0:{number}"}
    task = Task((0, 0, 0), loop.chat.ids("."), SamplingParams(max_tokens=2000), row)
    return asyncio.run(loop.run(task, generate)), prompts


def call(name: str, **arguments: str) -> str:
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{pairs}}}}}</tool_call>'


def test_a_task_set_of_verifiers_brings_prompts_tools_stops_and_rewards() -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    lookup = call("atlas_capital", country="Ghana")
    episode, prompts = play(CAPITALS, 1, lookup, "Accra")
    assert prompts[0].endswith("Capital of Ghana?<|assistant|>") and "Accra" in prompts[1]
    assert (episode.finish_reason, episode.outcome) == ("stop", pytest.approx(1.0 + 0.1 / 6))
    assert [(made["name"], made["text"]) for made in episode.info["calls"]] == [("atlas_capital", "Accra")]
    wrong, _ = play(CAPITALS, 1, "Lima")
    assert wrong.outcome == pytest.approx(0.1 / 5)
    stopped, _ = play(CAPITALS, 1, lookup, lookup, lookup)  # @stop: three turns
    assert len(stopped.turns) == 3 and len(stopped.info["calls"]) == 2


def test_states_of_rollouts_are_their_own() -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    make = taskset_of_run(load(CAPITALS).config).make

    async def rollout(times: int) -> float:
        env = make()
        row = {"messages": [{"role": "user", "content": "?"}], "extra_info": {"task": 0}}
        await env.reset(row)
        await env.heard("look")
        for _ in range(times):
            assert env.tool("atlas_capital")(country="Peru") == "Lima"
            await asyncio.sleep(0)
        await env.score()
        await env.close()
        return env._trace.metrics["looked_up"]  # type: ignore[attr-defined]

    async def both() -> list[float]:
        return await asyncio.gather(rollout(3), rollout(1))

    assert asyncio.run(both()) == [3.0, 1.0]


VERIFIERS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Odd(vf.Task[Data]):
    BODY

class Config(vf.TasksetConfig):
    pass

class Set(vf.Taskset[Odd, Config]):
    INFINITE = ENDLESS
    def load(self):
        while True:
            yield Odd(Data(FIELDS), self.config.task)
            if not self.INFINITE:
                return
"""


@pytest.mark.parametrize(
    ("fields", "body", "endless", "said"),
    [
        ("prompt=None", "pass", False, "task 0 has no prompt"),
        ("prompt='x', image='ubuntu'", "pass", False, "the image ubuntu: containers are not started"),
        ("prompt='x'", "NEEDS_CONTAINER = True", False, "NEEDS_CONTAINER"),
        ("prompt='x'", "pass", True, "its tasks never end: set most in"),
    ],
)
def test_what_cannot_be_played_is_told(tmp_path: Path, fields: str, body: str, endless: bool, said: str) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    text = VERIFIERS.replace("FIELDS", fields).replace("BODY", body).replace("ENDLESS", str(endless))
    (tmp_path / "odd.py").write_text(text)
    with pytest.raises(UserError, match=said):
        taskset_of_run(load(verifiers(f"{tmp_path}/odd.py:Set")).config)


def test_a_reward_may_use_a_runtime(tmp_path: Path) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    body = """@vf.reward
    async def printed(self, trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["echo", "5"], {})).stdout)"""
    text = VERIFIERS.replace("FIELDS", "prompt='x'").replace("BODY", body).replace("ENDLESS", "False")
    (tmp_path / "run.py").write_text(text)
    assert play(verifiers(f"{tmp_path}/run.py:Set"), 0, "a")[0].outcome == 5.0


needs_room = pytest.mark.skipif(ROOM.why_no_room() is not None, reason=f"no namespaces: {ROOM.why_no_room()}")


@needs_room
def test_harbor_tasks_are_worked_on_by_a_shell_and_judged_by_their_tests() -> None:
    episode, prompts = play(HARBOR, 1, call("bash", command="cat input.txt; echo 12 > sum.txt"), "done")
    assert "Add the numbers" in prompts[0] and "3\n4\n5" in prompts[1]
    assert episode.outcome == 1.0 and episode.info["calls"][0]["text"] == "3\n4\n5"
    assert play(HARBOR, 1, call("bash", command="echo 13 > sum.txt"), "done")[0].outcome == 0.25
    assert play(HARBOR, 1, "done")[0].outcome == 0.0
    assert play(HARBOR, 0, call("bash", command="rev input.txt > output.txt"), "done")[0].outcome == 1.0  # reward.txt
    failed = play(HARBOR, 0, call("bash", command="exit 3"), "done")[0]
    assert failed.info["calls"][0]["text"] == "(exit status 3)"


@needs_room
def test_the_policy_can_neither_write_the_reward_nor_read_the_tests() -> None:
    cheats = [
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; ls /tests",
        "ln -s /etc /tests; ln -s /tmp /logs; echo 1 > /tmp/reward.txt; rm -rf /app/* /etc; ln -s / /app/verifier",
    ]
    for cheat in cheats:
        episode, _ = play(HARBOR, 0, call("bash", command=cheat), "done")
        assert episode.outcome == 0.0


@needs_room
def test_a_room_has_neither_network_nor_files_of_the_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    app = tmp_path / "room"
    app.mkdir()

    def run(command: str, seconds: float = 10.0) -> tuple[str, int | None]:
        return tuple(ROOM.run_in_room(command, {"/app": app}, seconds=seconds, memory_mb=1024))

    assert run("echo a > b; cat b; pwd") == ("a\n/app\n", 0) and (app / "b").exists()
    assert run(f"cat {secret}")[1] == 1
    assert "Read-only" in run("touch /usr/bin/x")[0]
    assert run("mount -t tmpfs none /app")[1] != 0
    network = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    assert run(f'/usr/bin/env python3 -c "{network}"')[1] == 1
    assert run("sleep 30", 0.5) == ("", None)
    assert run("ps aux 2>/dev/null | wc -l; ls -d /proc/[0-9]* | wc -l")[1] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tests/test.sh", "it has no tests/test.sh"),
        ("instruction.md", "it has no instruction.md"),
        ("task.toml", "has no task.toml in or below it"),
    ],
)
@needs_room
def test_folders_that_are_no_tasks_are_told(tmp_path: Path, change: str, said: str) -> None:
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if name != change:
            (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / name).write_text("")
    with pytest.raises(UserError, match=said):
        taskset_of_run(load([HARBOR[0], f"data.taskset_kwargs={{folder: {tmp_path}}}"]).config)


@needs_room
def test_a_verifier_without_a_reward_is_the_episodes_error(tmp_path: Path) -> None:
    for name, text in {"task.toml": "", "instruction.md": "x", "tests/test.sh": "echo broken; exit 1"}.items():
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text(text)
    with pytest.raises(EpisodeFailed, match=r"tests/test.sh of a gave no reward .*: broken"):
        play([HARBOR[0], f"data.taskset_kwargs={{folder: {tmp_path}}}"], 0, "done")


def test_an_env_with_rows_is_a_task_set(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = [f"data.taskset={tmp_path}/own.py:Echo", "data.taskset_kwargs={words: [a, b]}"]
    assert play(own, 1, "b")[0].outcome == 1.0 and play(own, 0, "b")[0].outcome == 0.0


@pytest.mark.parametrize("name", ["no_such_set", "docs", "valor.errors:UserError"])
def test_an_unknown_name_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"data.taskset={name}: ") as told:
        taskset_of_run(load([f"data.taskset={name}"]).config)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["no_such_set", "valor.errors:UserError"])
def test_an_unknown_task_set_of_verifiers_is_one_line(name: str) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    with pytest.raises(UserError, match=f"verifiers_tasks.py:Verifiers: name={name}: ") as told:
        taskset_of_run(load(verifiers(name)).config)
    assert "\n" not in str(told.value)
