"""The toolbox of an episode: every misbehaviour of a policy or a tool ends in one text and one count."""

import asyncio
import enum
import json
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.utils.chat_template_utils import get_json_schema

from valor.agents import tool_runner
from valor.agents.env import Methods, env_source
from valor.agents.episode import EpisodeFailed
from valor.agents.formats import BadCall, ToolCall
from valor.agents.tool_runner import run_tool
from valor.agents.tool_sources import function_source
from valor.agents.tools import Toolbox, ToolResult, Toolset, text_and_images
from valor.config.rollout import MultiTurnConfig
from valor.errors import UserError


def methods_source(cls):
    return env_source(lambda: Methods(cls, {}))


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def fetch(key: str, missing: str | None = None) -> dict:
    """Look something up.

    Args:
        key: Its name.
        missing: What to answer if it is not there.
    """
    await asyncio.sleep(0)
    return {"key": key, "missing": missing}


class Colour(enum.Enum):
    RED = "red"


def painted(colour: Colour | None = None) -> str:
    """Say what came.

    Args:
        colour: A colour.
    """
    return repr(colour)


def typed(n: int = 0, pair: tuple[int, str] = (0, ""), x: float = 0.0) -> str:
    """Say what came.

    Args:
        n: A number.
        pair: Two things.
        x: Another number.
    """
    return repr((n, pair, x))


@dataclass
class Found:
    places: list[int]
    score: object


def odd(kind: str):
    """Misbehave.

    Args:
        kind: How.
    """
    if kind == "exit":
        raise SystemExit(3)
    if kind == "stop":
        raise StopIteration
    if kind == "cancel":
        raise asyncio.CancelledError
    if kind == "silent":
        raise RuntimeError
    if kind == "loop":
        while True:
            pass
    circle = []
    circle.append(circle)
    return {
        "megabyte": "x" * 1_000_000,
        "none": None,
        "surrogate": "a\ud800b\0c",
        "circle": circle,
        "object": range(2),
        "bytes": b"caf\xc3\xa9",
        "integer": np.int64(3),
        "numbers": {"a": np.arange(2), "t": torch.ones(1), "s": {1}},
        "fields": [Found([1], np.float32(0.5))],
        "generator": (kind for kind in "ab"),
        "tensor": ToolResult("fine", reward=torch.tensor(0.5)),
        "nan": ToolResult("fine", reward=float("nan")),
        "rewarded": ToolResult("well done", reward=0.5, metrics={"depth": 2}),
        "coroutine": fetch("x") if kind == "coroutine" else None,
    }[kind]


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def box(*sources, **limits):
    return Toolbox(
        Toolset(sources or [function_source([add, fetch, odd, typed])], MultiTurnConfig().model_copy(update=limits))
    )


def test_event_loops_have_cores_of_their_own(monkeypatch):
    """Episodes of training wait for their tools while others, on a loop of theirs, are validated."""
    monkeypatch.setattr(tool_runner, "_NUM_CORES", 1)
    begun, go_on, training = [], threading.Event(), asyncio.new_event_loop()
    threading.Thread(target=training.run_forever, daemon=True).start()

    def work(name):
        begun.append(name)
        go_on.wait(10)

    work.cpu_bound = True
    first = asyncio.run_coroutine_threadsafe(run_tool(work, {"name": "first"}, 10, "work"), training)
    while not begun:
        time.sleep(0.01)
    quick = asyncio.run_coroutine_threadsafe(run_tool(lambda: 3, {}, 10, "quick"), training)
    assert quick.result(10) == asyncio.run(run_tool(lambda: 3, {}, 10, "quick"))
    second = asyncio.run_coroutine_threadsafe(run_tool(work, {"name": "second"}, 10, "work"), training)
    time.sleep(0.2)
    assert begun == ["first"]
    go_on.set()
    first.result(10), second.result(10)
    training.call_soon_threadsafe(training.stop)
    assert begun == ["first", "second"]


async def call(toolbox, name, **arguments):
    return await do(toolbox, ToolCall(name, arguments))


async def do(toolbox, *calls):
    """The results of calls, in an episode that needs nothing of its row."""
    if not toolbox.calls:
        await toolbox.open({})
    results = await toolbox.call_all(calls)
    return results[0] if len(calls) == 1 else results


def test_functions_get_their_schemas_from_hints_and_docstrings():
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in box().schemas}
    assert schemas["add"]["required"] == ["a"] and schemas["add"]["properties"]["b"]["type"] == "integer"
    assert schemas["fetch"]["properties"]["key"] == {"type": "string", "description": "Its name."}


@pytest.mark.parametrize(
    ("tool_call", "text", "error"),
    [
        (ToolCall("add", {"a": 2, "b": 3}), "5", None),
        (ToolCall("fetch", {"key": "é", "missing": None}), '{"key": "é", "missing": null}', None),
        (BadCall("{", 'the call has no "name"'), 'Error: malformed tool call, the call has no "name".', "malformed"),
        (
            ToolCall("ad", {}),
            "Error: unknown tool 'ad'; did you mean add? (the tools are add, fetch, odd, typed).",
            "unknown",
        ),
        (ToolCall("add", {}), "Error: wrong arguments for add, 'a' is a required property.", "arguments"),
        (ToolCall("add", {"a": "2"}), "Error: wrong arguments for add, a: '2' is not of type 'integer'.", "arguments"),
        (
            ToolCall("fetch", {"key": "x", "mising": "y"}),
            "Error: wrong arguments for fetch, Unevaluated properties are not allowed ('mising' was unexpected).",
            "arguments",
        ),
        (ToolCall("odd", {"kind": "no"}), "Error: odd raised KeyError: 'no'.", "exception"),
        (ToolCall("odd", {"kind": "exit"}), "Error: odd raised SystemExit: 3.", "exception"),
        (ToolCall("odd", {"kind": "stop"}), "Error: odd raised StopIteration.", "exception"),
        (ToolCall("odd", {"kind": "cancel"}), "Error: odd raised CancelledError.", "exception"),
        (ToolCall("odd", {"kind": "silent"}), "Error: odd raised RuntimeError.", "exception"),
        (ToolCall("odd", {"kind": "none"}), "null", None),
        (ToolCall("odd", {"kind": "surrogate"}), "a\ufffdb\ufffdc", None),
        (ToolCall("odd", {"kind": "circle"}), "[[...]]", None),
        (ToolCall("odd", {"kind": "object"}), "range(0, 2)", None),
        (ToolCall("odd", {"kind": "bytes"}), "café", None),
        (ToolCall("odd", {"kind": "integer"}), "3", None),
        (ToolCall("odd", {"kind": "numbers"}), '{"a": [0, 1], "t": [1.0], "s": [1]}', None),
        (ToolCall("odd", {"kind": "fields"}), '[{"places": [1], "score": 0.5}]', None),
        (
            ToolCall("odd", {"kind": "generator"}),
            "Error: odd raised TypeError: it has a `yield`: return the answer.",
            "exception",
        ),
        (
            ToolCall("typed", {"n": 3.0, "pair": [1, "a"], "x": 2}),
            "(3, (1, 'a'), 2)",
            None,
        ),
        (ToolCall("typed", {"pair": [1]}), "(0, [1], 0.0)", None),
        (
            ToolCall("odd", {"kind": "nan"}),
            "Error: what odd returned cannot be used, ValueError: its reward is nan.",
            "failed",
        ),
        (
            ToolCall("odd", {"kind": "coroutine"}),
            "Error: odd raised TypeError: it returned a coroutine: define it with `async def`.",
            "exception",
        ),
    ],
)
def test_every_call_ends_in_one_text(tool_call, text, error):
    toolbox = box()
    result = run(do(toolbox, tool_call))
    assert (result.text, result.error) == (text, error)


def test_members_of_an_enumeration_are_their_values_in_a_call():
    """Before 5.23 transformers calls them objects, which no right call has."""
    if "enum" not in str(get_json_schema(painted)):
        with pytest.raises(UserError, match="knows no Enum: take"):
            function_source([painted])
        return
    toolbox = box(function_source([painted]))
    for value, text in (("red", "<Colour.RED: 'red'>"), (None, "None")):
        assert run(do(toolbox, ToolCall("painted", {"colour": value}))).text == text
    assert run(do(toolbox, ToolCall("painted", {"colour": "green"}))).error == "arguments"


def test_a_tool_may_say_its_reward_and_metrics():
    result = run(call(box(), "odd", kind="rewarded"))
    assert (result.text, result.reward, result.metrics) == ("well done", 0.5, {"depth": 2}) and result.seconds > 0
    assert type(run(call(box(), "odd", kind="tensor")).reward) is float


def test_parts_of_a_message_are_what_they_hold():
    """As TRL's tools and environments may return them."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert text_and_images(parts) == ("a b", [])
    assert text_and_images([*parts, {"type": "image", "image": b"x"}]) == ("a b", [b"x"])
    for other in ([], [{"type": "text", "text": "a", "score": 1}], [{"type": "text"}], [*parts, "c"]):
        assert text_and_images(other) == (json.dumps(other), [])

    class Parts(Counter):
        def reset(self, prompt, shown=(), **columns):
            return [{"type": "text", "text": f"so {prompt[0]['content']}"}, *shown]

    row = {"messages": [{"role": "user", "content": "Q"}]}
    assert run((toolbox := box(methods_source(Parts))).open(row)) == "so Q" and toolbox.messages is None
    picture = {"type": "image", "image": b"x"}
    assert run((toolbox := box(methods_source(Parts))).open({**row, "shown": [picture]})) is None
    told = [{"type": "text", "text": "Q"}, {"type": "text", "text": "so Q"}, picture]
    assert toolbox.messages == [{"role": "user", "content": told}]


@pytest.mark.parametrize(
    ("side", "most", "text"),
    [
        ("left", 4, "(truncated)...xxxx"),
        ("right", 4, "xxxx...(truncated)"),
        ("middle", 5, "xx...(truncated)...xx"),
        ("middle", 1, "(truncated)"),
        ("left", 0, "(truncated)"),
        ("left", None, "x" * 1_000_000),
    ],
)
def test_long_texts_lose_the_named_side(side, most, text):
    toolbox = box(max_tool_response_length=most, tool_response_truncate_side=side)
    assert run(call(toolbox, "odd", kind="megabyte")).text == text


def test_calls_beyond_the_limit_of_a_turn_are_answered_by_one_text():
    toolbox = box(max_parallel_calls=2)
    results = run(do(toolbox, *(ToolCall("add", {"a": i}) for i in range(5))))
    assert [result.text for result in results] == ["1", "2", "Error: only the first 2 of these calls were done."]
    assert results[-1].error == "excess" and len(run(toolbox.call_all([]))) == 0


def test_a_busy_loop_is_given_up_and_its_thread_ends():
    toolbox = box(tool_timeout=0.1)
    before = threading.active_count()

    async def episode():
        result = await call(toolbox, "odd", kind="loop")
        while threading.active_count() > before:
            await asyncio.sleep(0.05)
        return result

    assert run(episode()).text == "Error: odd gave no answer within 0.1 s."


def test_a_cancelled_episode_cancels_its_call():
    ended = []

    async def wait() -> None:
        """Wait."""
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def episode():
        task = asyncio.create_task(call(box(function_source([wait])), "wait"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert ended == [True]

    run(episode())


@pytest.mark.alone
@pytest.mark.parametrize("blocking", [True, False])
def test_many_episodes_wait_for_their_tools_at_the_same_time(blocking):
    def sleep() -> str:
        """Sleep."""
        time.sleep(0.05)
        return "done"

    async def asleep() -> str:
        """Sleep."""
        await asyncio.sleep(0.05)
        return "done"

    toolset = Toolset([function_source([sleep, asleep])])

    async def episode():
        toolbox = Toolbox(toolset)
        await toolbox.open({})
        texts = [(await call(toolbox, "sleep" if blocking else "asleep")).text for _ in range(2)]
        await toolbox.close()
        return texts

    async def episodes():
        began = time.monotonic()
        assert await asyncio.gather(*(episode() for _ in range(200))) == [["done"] * 2] * 200
        return time.monotonic() - began

    assert 0.1 <= run(episodes()) < 2  # one after the other they would take 20


class Counter:
    """An environment that counts."""

    made, released = 0, threading.Event()

    def __init__(self):
        Counter.made += 1
        self.value, self.inside, self.closed = 0, 0, False

    def reset(self, start: int, **columns) -> str:
        self.value, self.columns = start, columns
        return f"It stands at {start}."

    def up(self, by: int) -> int:
        """Count up.

        Args:
            by: How much.
        """
        self.inside += 1
        assert self.inside == 1
        time.sleep(0.01)
        self.value += by
        self.inside -= 1
        return self.value

    async def fail(self) -> str:
        """Fail."""
        raise ValueError("no more")

    def hang(self) -> None:
        """Wait."""
        Counter.released.wait()

    def get_reward(self) -> float:
        return self.value / 10

    def close(self):
        Counter.last, self.closed = self, True

    def _hidden(self):
        pass


def test_each_episode_has_an_environment_to_itself_whose_calls_do_not_overlap():
    toolset = Toolset([methods_source(Counter)], MultiTurnConfig(max_parallel_calls=8))

    async def episode(start):
        toolbox = Toolbox(toolset)
        assert {schema["function"]["name"] for schema in toolbox.schemas} == {"up", "fail", "hang"}
        text = await toolbox.open({"extra_info": {"start": start, "other": 1}, "uid": "a"})
        results = await toolbox.call_all([ToolCall("up", {"by": 1})] * 3)
        assert (await call(toolbox, "fail")).text == "Error: fail raised ValueError: no more."
        reward = await toolbox.rewards()
        await toolbox.close()
        return text, sorted(result.text for result in results), reward, Counter.last.columns["other"]

    async def episodes():
        return await asyncio.gather(episode(0), episode(5))

    made = Counter.made
    assert run(episodes()) == [
        ("It stands at 0.", ["1", "2", "3"], 0.3, 1),
        ("It stands at 5.", ["6", "7", "8"], 0.8, 1),
    ]
    assert Counter.made == made + 2 and Counter.last.closed


def test_a_call_waits_for_one_that_was_given_up():
    toolbox = box(methods_source(Counter), tool_timeout=0.5)

    async def episode():
        await toolbox.open({"start": 0})
        first = await call(toolbox, "hang")
        second = await call(toolbox, "up", by=1)
        with pytest.raises(EpisodeFailed, match=r"score\(\) gave no answer within"):
            await toolbox.rewards()
        Counter.released.set()
        third = await call(toolbox, "up", by=1)
        return first.error, second.error, third.text

    assert run(episode()) == ("timeout", "timeout", "1")


def test_an_interrupted_method_leaves_the_environment_free():
    class Slow(Counter):
        def wait(self) -> None:
            """Wait."""
            while True:
                time.sleep(0.01)

    toolbox = box(methods_source(Slow), tool_timeout=0.5)

    async def episode():
        await toolbox.open({"start": 3})
        return (await call(toolbox, "wait")).error, await toolbox.rewards()

    assert run(episode()) == ("timeout", 0.3)


def test_an_environment_that_cannot_begin_is_an_error_of_the_episode():
    toolbox = box(methods_source(Counter))
    with pytest.raises(EpisodeFailed, match=r"reset\(\) raised TypeError: .*'start'"):
        run(toolbox.open({}))
    run(toolbox.close())


def test_a_row_selects_its_tools():
    toolbox = box()
    run(toolbox.open({"extra_info": {"tool_selection": ["add"]}}))
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["add"]
    assert run(call(toolbox, "fetch", key="x")).text == "Error: unknown tool 'fetch' (the tools are add)."
    assert run(toolbox.rewards()) is None
    with pytest.raises(UserError, match=r"tool_selection: 'ad' is not one of the tools; did you mean add\?"):
        run(box().open({"extra_info": {"tool_selection": ["ad"]}}))
    with pytest.raises(UserError, match="tools_kwargs: 'add' is a function or a method, which takes none"):
        run(box().open({"extra_info": {"tools_kwargs": {"add": {"create_kwargs": {}}, "gone": None}}}))
    with pytest.raises(UserError, match="tools_kwargs: 'ad' is not one of the tools"):
        run(box().open({"extra_info": {"tools_kwargs": {"ad": {"create_kwargs": {}}, "gone": None}}}))
    add.takes_kwargs = True
    toolbox = box(function_source([add]))
    del add.takes_kwargs
    run(toolbox.open({"extra_info": {"tools_kwargs": {"add": {"create_kwargs": {}, "ground_truth": None}}}}))
    for extra_info, message in [
        (
            {"tools_kwargs": {"add": {"create_kwarg": {}}}},
            r"tools_kwargs\.add: 'create_kwarg'; did you mean create_kwargs\?",
        ),
        ({"tools_kwargs": {"add": {"create_kwargs": "72"}}}, r"'create_kwargs'.* each with a dictionary"),
        ({"tools_kwargs": {"add": "72"}}, "'72' .its keys are create_kwargs, execute_kwargs"),
        ({"tools_kwargs": '{"add": {}}'}, "tools_kwargs must be a dictionary by tools, got str"),
        ({"tool_selection": "add"}, "tool_selection must be a list of tools, got 'add'"),
    ]:
        with pytest.raises(UserError, match=message):
            run(toolbox.open({"extra_info": extra_info}))


def test_tools_that_cannot_be_described_are_refused():
    class NoReset:
        pass

    class NoTools:
        def reset(self):
            pass

    class NeedsArguments(Counter):
        def __init__(self, size):
            pass

    def any_number(*numbers: int) -> int:
        """Add."""
        return sum(numbers)

    def unnamed(a: int, /) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a

    def numpy_style(a: int) -> int:
        """Add.

        Parameters
        ----------
        a : int
            A number.
        """
        return a

    def untyped(a) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a

    for make, message in [
        (lambda: function_source([any_number]), r"any_number\(\) cannot be a tool: \*args"),
        (lambda: function_source([unnamed]), r"unnamed\(\) cannot be a tool: .* arguments before a /"),
        (lambda: function_source([numpy_style]), "description for the argument 'a'; write a Google docstring"),
        (lambda: function_source([untyped]), r"untyped\(\) cannot be a tool: Argument a is missing a type hint"),
        (lambda: function_source([lambda: 3]), "cannot be a tool"),
        (lambda: methods_source(NoReset), r"has no method reset\(\)"),
        (lambda: methods_source(NoTools), "it has no tools"),
        (
            lambda: methods_source(NeedsArguments),
            "cannot be made with these environment_kwargs: missing a required argument",
        ),
        (lambda: Toolset([function_source([add, add])]), "several tools of the name add"),
    ]:
        with pytest.raises(UserError, match=message):
            make()
