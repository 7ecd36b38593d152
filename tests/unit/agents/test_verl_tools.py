"""verl's tools: classes in a yaml file with their life from create to release, and functions under @function_tool."""

import asyncio
import inspect
import textwrap

import pytest

from valor.agents.builtin_tools import make_python
from valor.agents.chat import Chat
from valor.agents.env import env_source, find_env
from valor.agents.episode import EpisodeFailed
from valor.agents.formats import ToolCall
from valor.agents.tool_files import load_sources
from valor.agents.tools import Toolbox, Toolset
from valor.agents.verl_tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, base_tool_source
from valor.config.rollout import MultiTurnConfig
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Submit an answer.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The answer."}},
                "required": ["answer"],
            },
        },
    }
)


class Submit(BaseTool):
    """In the shape of verl's Gsm8kTool: old and new ways to be created."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.instances, self.log = {}, []

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        assert kwargs["create_kwargs"]["ground_truth"] == ground_truth
        self.instances[instance_id] = {"right": ground_truth, "answer": None}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.log.append(kwargs)
        self.instances[instance_id]["answer"] = parameters["answer"]
        return ToolResponse(text="noted"), -0.05, {"length": len(parameters["answer"])}

    async def calc_reward(self, instance_id, **kwargs):
        instance = self.instances[instance_id]
        return float(instance["answer"] == instance["right"])

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]


class Old(BaseTool):
    """create returns an id alone, execute a text; both block."""

    released = 0

    def create(self, instance_id):
        return "one"

    def execute(self, instance_id, parameters, **kwargs):
        assert instance_id == "one"
        return "old", None, None

    def release(self, instance_id):
        Old.released += 1
        raise OSError("gone already")


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def named(name):
    return OpenAIFunctionToolSchema.model_validate({"function": {"name": name}})


def test_instances_live_from_create_to_release():
    tool = Submit({}, SCHEMA)
    toolset = Toolset([base_tool_source([tool])])
    kwargs = {"create_kwargs": {"ground_truth": "72"}, "execute_kwargs": {"strict": True}}
    row = {"extra_info": {"tools_kwargs": {"submit": kwargs}}}

    async def episode(answer):
        toolbox = Toolbox(toolset)
        await toolbox.open(row)
        results = await toolbox.call_all([ToolCall("submit", {"answer": answer})])
        reward = await toolbox.rewards(scored=False)
        await toolbox.close()
        return results[0], reward

    async def episodes():
        return await asyncio.gather(episode("72"), episode("7"))

    (right, one), (wrong, nothing) = run(episodes())
    assert (right.text, right.reward, right.metrics, right.error) == ("noted", -0.05, {"length": 2}, None)
    assert (one, nothing, wrong.metrics["length"]) == (1.0, 0.0, 1)
    assert tool.instances == {} and tool.log == [{"strict": True}] * 2


def test_older_shapes_and_a_release_that_fails():
    toolbox = Toolbox(Toolset([base_tool_source([Old({}, named("a")), Old({}, named("b"))])]))
    Old.released = 0

    async def episode():
        await toolbox.open({})
        result = await toolbox.call(ToolCall("a", {}))
        reward = await toolbox.rewards(scored=False)
        await toolbox.close()
        return result.text, result.error, reward

    assert run(episode()) == ("old", None, None)
    assert Old.released == 2


def test_what_cannot_be_created_or_rewarded_is_an_error_of_the_episode():
    class Picky(BaseTool):
        async def calc_reward(self, instance_id, **kwargs):
            return float("nan")

    toolbox = Toolbox(Toolset([base_tool_source([Picky({}, named("p"))])]))

    async def episode():
        await toolbox.open({})
        return await toolbox.rewards(scored=False)

    with pytest.raises(EpisodeFailed, match="no finite number"):
        run(episode())
    Picky.calc_reward = lambda self, instance_id: []  # as verl's SandboxFusionTool
    toolbox = Toolbox(Toolset([base_tool_source([Picky({}, named("p"))])]))
    assert run(episode()) is None
    toolbox = Toolbox(Toolset([base_tool_source([Submit({}, SCHEMA)])]))
    with pytest.raises(EpisodeFailed, match=r"submit\.create raised KeyError: 'ground_truth'"):
        run(toolbox.open({}))


def test_images_are_refused_in_a_run_on_text():
    class Camera(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(image=[1]), 0.0, {}

    toolbox = Toolbox(
        Toolset(
            [base_tool_source([Camera({}, named("look"))])],
            MultiTurnConfig().model_copy(update={"max_tool_response_length": None}),
        )
    )
    toolbox.chat = Chat(make_tokenizer())

    async def episode():
        await toolbox.open({})
        return await toolbox.call(ToolCall("look", {}))

    result = run(episode())
    assert result.error == "failed" and "the run reads text: set data.image_key" in result.text


TOOLS_FILE = """
tools:
  - class_name: "tools_of_mine.py:Echo"
    config: {type: native, prefix: "> ", times: 1e0}
    tool_schema:
      type: function
      function:
        name: echo
        description: Say it again.
        parameters: {type: object, properties: {text: {type: string, description: What.}}, required: [text]}
  - class_name: python
    config: {cpu_seconds: 2}
"""
PYTHON_FILE = """
from valor.agents import BaseTool, ToolResponse, function_tool

class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=self.config["prefix"] * int(self.config["times"]) + parameters["text"]), 0.0, {}

@function_tool
def double(n: int):
    '''Double it.

    Args:
        n: A number.
    '''
    return {"doubled": 2 * n}, 0.25, {"n": n}

@function_tool("think")
async def thought(text: str) -> str:
    '''Think.

    Args:
        text: A thought.
    '''
    return "hm"
"""


@pytest.mark.slow
def test_tools_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS_FILE)
    (tmp_path / "tools_of_mine.py").write_text(PYTHON_FILE)
    toolbox = Toolbox(Toolset(load_sources("tools.yaml", "tools_of_mine.py")))
    names = {schema["function"]["name"] for schema in toolbox.schemas}
    assert names == {"echo", "python", "double", "think"}

    async def episode():
        await toolbox.open({"extra_info": {}})
        calls = [("echo", {"text": "hi"}), ("double", {"n": 4}), ("think", {"text": "x"}), ("python", {"code": "6*7"})]
        return [await toolbox.call(ToolCall(*call)) for call in calls]

    results = run(episode())
    assert [result.text for result in results] == ["> hi", '{"doubled": 8}', "hm", "42"]
    assert (results[1].reward, results[1].metrics) == (0.25, {"n": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; check rollout.multi_turn.tool_config_path"),
        ("a: [", "is not yaml"),
        ("tools: []\ntools: [{class_name: python}]", "is not yaml: .* found duplicate key tools"),
        ("tools: {}", "tools: Input should be a valid list; check rollout.multi_turn.tool_config_path"),
        ("tools: [{config: {}}]", r"tools.0.class_name: Field required"),
        ("tools: [{class_name: pyton}]", r"no built-in tool 'pyton'; did you mean python\?"),
        ("tools: [{class_name: python, schema: {}}]", "tools.0.schema: Extra inputs are not permitted"),
        ("tools: [{class_name: python, config: {size: 1}}]", "python cannot be made .*'size'"),
        ("tools: [{class_name: no.such.Tool}]", r"'no.such' cannot be imported \(ModuleNotFoundError"),
        ("tools: [{class_name: valor.agents.BaseTol}]", r"has no 'BaseTol'; did you mean BaseTool\?"),
        ("tools: [{class_name: valor.agents.BaseTool}]", "BaseTool has no schema"),
        ("tools: [{class_name: collections.Counter}]", "is no tool: derive it from valor.agents.BaseTool"),
        ("tools: [{class_name: python, config: {type: mcp}}]", "config.type=mcp is not supported, only native"),
        ("tools: [{class_name: a.B, tool_schema: {function: {}}}]", "tool_schema.function.name: Field required"),
        ("tools: [{class_name: '${oc.env:X}'}]", "is not filled in here"),
    ],
)
def test_mistakes_in_a_tools_file_are_one_line(tmp_path, text, message):
    path = tmp_path / "tools.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Toolset(load_sources(str(path)))
    assert "\n" not in str(caught.value)


def test_a_schema_that_is_none_and_a_file_without_tools_are_refused(tmp_path):
    schema = {"function": {"name": "x", "parameters": {"type": "objekt"}}}
    tool = BaseTool({}, OpenAIFunctionToolSchema.model_validate(schema))
    with pytest.raises(UserError, match="parameters of tool x are no JSON schema: 'objekt'"):
        Toolset([base_tool_source([tool])])
    path = tmp_path / "empty.py"
    path.write_text(textwrap.dedent("def f():\n    pass\n"))
    with pytest.raises(UserError, match=r"has no function under @function_tool"):
        load_sources(function_tool_path=str(path))


def test_environments_are_found_by_name(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(
        'class E:\n    def reset(self): pass\n    def go(self) -> int:\n        """Go."""\n        return 1\n'
    )
    source = env_source(find_env(f"{path}:E", {}))
    assert source.schemas[0]["function"]["name"] == "go"


@pytest.mark.slow
def test_python_shows_output_value_and_errors():
    python = make_python(cpu_seconds=1)
    assert inspect.signature(python).parameters.keys() == {"code"}
    assert python("x = 3\nprint('a')\nx * 2").text == "a\n6"
    assert python("import sys\nsys.stderr.write('e')\nNone").text == "e"
    failed = python("print(1)\ndef f():\n    return 1 / 0\nf()")
    assert failed.text.startswith("1\nTraceback") and failed.text.endswith("ZeroDivisionError: division by zero")
    assert 'File "code", line 3, in f' in failed.text and "exec" not in failed.text and failed.error is None
    assert python("1 +").text.endswith("SyntaxError: invalid syntax")
    assert python("open('/etc/passwd', 'w')").text.splitlines()[-1].split(":")[0].endswith("Error")
    assert python("print('\ud800' == '\\ud800')").text.startswith("UnicodeEncodeError")
    late = python("while True: pass")
    assert late.error == "timeout" and late.text.startswith("Error: ")
    ended = python("print('bye')\nraise SystemExit(3)")
    assert (ended.text, ended.error) == ("bye\nError: exit status 3.", "failed")
