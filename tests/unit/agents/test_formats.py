"""Tool calls in the text of a turn: what is a call, what is a bad one and why, what is thinking, what is said."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valor.agents.formats import BUILT_IN, FORMATS, BadCall, ToolCall, register_format
from valor.errors import UserError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean", "nullable": True},
                "places": {"type": "array"},
                "note": {"type": ["string", "null"]},
            },
        },
    },
}
_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=days>"]
_TAGS += ["</parameter>", '{"name": "a"', '"arguments": {}', "}", "[" * 5000, "9" * 5000, "NaN"]
_TEXTS = st.lists(st.sampled_from(_TAGS) | st.text(max_size=8), max_size=12).map("".join)
_NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    max_leaves=5,
)


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=_TEXTS)
@settings(max_examples=300, deadline=None)
def test_a_format_reads_any_text(name, text):
    parsed = FORMATS[name](text, [WEATHER])
    assert all(isinstance(call, ToolCall | BadCall) for call in parsed.calls)
    assert all(isinstance(call.arguments, dict) for call in parsed.calls if isinstance(call, ToolCall))


def _hermes(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@given(calls=st.lists(st.tuples(_NAMES, st.dictionaries(st.text(), _VALUES, max_size=4)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_rendered_calls_are_read_again(calls):
    text = "".join(_hermes(*call) for call in calls)
    assert FORMATS["hermes"](text, []).calls == [ToolCall(*call) for call in calls]


@given(city=st.text().filter(lambda t: "</parameter>" not in t and "</tool_call>" not in t), days=st.integers())
@settings(max_examples=150, deadline=None)
def test_values_without_quotes_keep_their_text(city, days):
    text = (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n"
        f"<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
    )
    if "</think>" not in text:
        assert FORMATS["qwen3_coder"](text, [WEATHER]).calls == [ToolCall("weather", {"city": city, "days": days})]


def test_calls_thinking_and_content_are_told_apart():
    text = (
        '<think>I could <tool_call>{"name": "no"}</tool_call></think>Let me look. <tool_call>'
        '{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call> and '
        '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    )
    parsed = FORMATS["hermes"](text, [])
    assert parsed.calls == [ToolCall("a", {"x": "</tool_call>"}), ToolCall("b", {})]
    assert parsed.content == "Let me look.  and"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_thinking_that_began_in_the_prompt_or_does_not_end_holds_no_calls(name):
    call = "<tool_call>a</tool_call>"
    began = FORMATS[name](f"{call}\n</think>\nIt is 4.", [])
    assert began == ([], "It is 4.")
    assert FORMATS[name](f"<think>{call}", []) == ([], "")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}', "<tool_call> has no </tool_call>"),
        ("hermes", '<tool_call>{"name": "a", }</tool_call>', "it is not valid JSON: "),
        ("hermes", '<tool_call>["a"]</tool_call>', 'the call has no "name"'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'the call has no "name"'),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', '"arguments" must be a JSON object'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "it is not valid JSON: a number"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "it is not valid JSON: a number"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1, "x": 2}}</tool_call>', '"x" is there twice'),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "it is nested too deeply"),
        ("qwen3_coder", '<tool_call>{"name": "a"}</tool_call>', "it must be <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=a>x=1</function></tool_call>", "it must be <function=NAME>"),
    ],
)
def test_a_bad_call_has_a_reason(name, text, reason):
    (call,) = FORMATS[name](text, []).calls
    assert isinstance(call, BadCall) and call.reason.startswith(reason)


def test_values_become_what_the_schema_says():
    arguments = {"days": "3", "exact": "True", "places": '["a"]', "city": "7", "note": "null"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    (call,) = FORMATS["qwen3_coder"](f"<tool_call><function=weather>{body}</function></tool_call>", [WEATHER]).calls
    assert call == ToolCall("weather", {"days": 3, "exact": True, "places": ["a"], "city": "7", "note": None})
    body = "<parameter=days>soon</parameter><parameter=note>5</parameter><parameter=exact>None</parameter>"
    (call,) = FORMATS["qwen3_coder"](f"<tool_call><function=weather>{body}</function></tool_call>", [WEATHER]).calls
    assert call == ToolCall("weather", {"days": "soon", "note": "5", "exact": None})


def test_tags_of_thinking_among_the_arguments_are_text():
    arguments = {"text": "<think></think> </tool_call>"}
    assert FORMATS["hermes"](_hermes("a", arguments), []).calls == [ToolCall("a", arguments)]


def test_formats_are_found_by_name():
    with pytest.raises(UserError, match=r"unknown rollout.multi_turn.format 'hermess'; did you mean hermes\?"):
        FORMATS["hermess"]
    register_format("mine")(FORMATS["hermes"])
    assert FORMATS["mine"] is FORMATS["hermes"]
    del FORMATS["mine"]


DEFINED = {
    "Period": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
    "Count": {"type": ["integer", "null"]},
    "Mixed": {"enum": ["1", 2, None, True, 1.5]},
}
WRITTEN = [  # schema of an argument, what is written, what the tool gets
    ({"$ref": "#/$defs/Period"}, '{"days": 7}', {"days": 7}),
    ({"$ref": "#/$defs/Period"}, '{"days": "x"}', {"days": "x"}),  # wrong in one place, and so it is said
    ({"type": "array", "items": {"$ref": "#/$defs/Period"}}, '[{"days": 1}]', [{"days": 1}]),
    ({"allOf": [{"$ref": "#/$defs/Period"}]}, '{"days": 7}', {"days": 7}),
    ({"$ref": "#/$defs/Count"}, "null", None),
    ({"$ref": "#/$defs/Count"}, "3", 3),
    ({"$ref": "#/$defs/Mixed"}, "1", "1"),
    ({"$ref": "#/$defs/Mixed"}, "2", 2),
    ({"$ref": "#/$defs/Mixed"}, "None", None),
    ({"$ref": "#/$defs/Mixed"}, "True", True),
    ({"$ref": "#/$defs/Mixed"}, "1.5", 1.5),
    ({"const": 3}, "3", 3),
    ({"const": "3"}, "3", "3"),
    ({"enum": ["a"]}, '"a"', "a"),
    ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[1]", [1]),
    ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "plain", "plain"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "soon", "soon"),
    ({"if": {"type": "integer"}, "then": {"minimum": 1}, "else": {"type": "null"}}, "5", 5),
    ({"type": "integer", "maximum": 5}, "7", 7),
    ({"type": "string", "maxLength": 2}, "12345", "12345"),
    ({"type": "string"}, '"7"', '"7"'),
    ({"type": "string"}, "True", "True"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
    ({"description": "anything"}, "5", "5"),
    ({"$ref": "#/$defs/Nowhere"}, "5", "5"),
]


def _coder(**arguments):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def _tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(("schema", "written", "value"), WRITTEN)
def test_a_value_without_quotes_is_what_its_json_schema_takes(schema, written, value):
    tool = _tool({"type": "object", "properties": {"x": schema}, "$defs": DEFINED})
    (call,) = FORMATS["qwen3_coder"](_coder(x=written), [tool]).calls
    assert call == ToolCall("f", {"x": value}) and type(call.arguments["x"]) is type(value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"x": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"x": {"type": "integer"}}}]},
        {"oneOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x", "y"]}, {"required": ["z"]}]},
        {"additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^x": {"type": "integer"}}},
    ],
)
def test_the_schema_of_an_argument_may_be_anywhere(parameters):
    (call,) = FORMATS["qwen3_coder"](_coder(x="5"), [_tool(parameters)]).calls
    assert call.arguments == {"x": 5}


TAGS = ["</think>", "<think>", "</tool_call>", "<tool_call>", "</parameter>", "</function>", "<parameter=y>"]
TAGS += [
    "<function=f>",
    "</parameter>\n</function>",
    "</function>\n</tool_call>",
    "<think>x</think>",
    "</think><tool_call>",
]


@pytest.mark.parametrize("before", ["", "a thought\n</think>\n", "<think>a thought</think>", "Let me see. "])
@pytest.mark.parametrize("tag", TAGS)
def test_tags_in_an_argument_are_text(tag, before):
    arguments = {"x": f"s {tag} e", "y": "z"}
    swapped = json.dumps({"arguments": arguments, "name": "f"})
    for name, call in (
        ("hermes", _hermes("f", arguments)),
        ("hermes", f"<tool_call>{swapped}</tool_call>"),
        ("qwen3_coder", _coder(**arguments)),
    ):
        parsed = FORMATS[name](f"{before}{call} Bye.", [_tool({"properties": {"x": {}, "y": {}}})])
        assert parsed.calls == [ToolCall("f", arguments)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</think>"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</think>'),
        ("hermes", '{"name": "f", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", _coder(x="a\n</parameter>\n</function>\n</tool_call>\nb")),
        ("qwen3_coder", _coder(x="a\n</parameter>\n<parameter=x>\nb")),
        ("qwen3_coder", _coder(x="</think>").removesuffix("</tool_call>")),
        ("qwen3_coder", "<tool_call><function=f><parameter=x></think></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=x></think>"),
        ("qwen3_coder", _coder(x="1").removeprefix("<tool_call>")),
    ],
)
def test_a_call_that_cannot_be_told_from_its_argument_is_complained_of(name, text):
    (call,) = FORMATS[name](text, [_tool({"properties": {"x": {}}})]).calls
    assert isinstance(call, BadCall)


def test_thinking_may_name_the_tag():
    thought = "I could use <tool_call> here.\n</think>\n"
    assert FORMATS["hermes"](f"{thought}It is 4.", []) == ([], "It is 4.")
    assert FORMATS["hermes"](thought + _hermes("f", {}), []).calls == [ToolCall("f", {})]
    assert FORMATS["hermes"](f"{_hermes('f', {})} or so\n</think> 4 </think>", []) == ([], "4 </think>")


def test_half_a_surrogate_pair_is_replaced():
    call = '<tool_call>{"name": "f", "arguments": {"x": ["\\ud83d", {"\\udc00": "\\ud83d\\ude00"}]}}</tool_call>'
    assert FORMATS["hermes"](call, []).calls == [ToolCall("f", {"x": ["\ufffd", {"\ufffd": "\U0001f600"}]})]
    assert ToolCall("\ud83d", {"x": ("\ud83d", 1)}) == ToolCall("\ufffd", {"x": ("\ufffd", 1)})
    (call,) = FORMATS["qwen3_coder"](_coder(x='["\\ud83d"]'), [_tool({"properties": {"x": {"type": "array"}}})]).calls
    assert call.arguments == {"x": ["\ufffd"]}


def _bare(value):
    return value if isinstance(value, str) else json.dumps(value)


GEMMA_QUOTE = '<|"|>'


def _gemma(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_gemma(part, quote) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma(part, quote)}' for key, part in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)  # None as Jinja writes it


DEEPSEEK = "<\uff5ctool▁{}\uff5c>".format
WRITTEN_BY = {  # how each family writes calls: the text of some, and of one between others
    "llama3_json": (lambda name, arguments: json.dumps({"name": name, "parameters": arguments}), "{}", "; "),
    "mistral": (lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}", "{}", ""),
    "gpt-oss": (
        lambda name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        ),
        "<|start|>assistant{}",
        "<|start|>assistant",
    ),
    "deepseek_v3": (
        lambda name, arguments: (
            f"{DEEPSEEK('call▁begin')}function{DEEPSEEK('sep')}{name}\n```json\n"
            f"{json.dumps(arguments)}\n```{DEEPSEEK('call▁end')}"
        ),
        f"{DEEPSEEK('calls▁begin')}{{}}{DEEPSEEK('calls▁end')}",
        "\n",
    ),
    "kimi": (
        lambda name, arguments: (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        ),
        "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        "",
    ),
    "glm": (
        lambda name, arguments: (
            f"<tool_call>{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in arguments.items()
            )
            + "</tool_call>"
        ),
        "{}",
        "\n",
    ),
    "minimax": (
        lambda name, arguments: (
            f'<invoke name="{name}">\n'
            + "".join(f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in arguments.items())
            + "</invoke>\n"
        ),
        "<minimax:tool_call>\n{}</minimax:tool_call>",
        "",
    ),
    "lfm2": (
        lambda name, arguments: f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})",
        "<|tool_call_start|>[{}]<|tool_call_end|>",
        ", ",
    ),
    "gemma4": (
        lambda name, arguments: f"<|tool_call>call:{name}{_gemma(arguments, GEMMA_QUOTE)}<tool_call|>",
        "{}<|tool_response>",
        "",
    ),
    "functiongemma": (
        lambda name, arguments: f"<start_function_call>call:{name}{_gemma(arguments, '<escape>')}<end_function_call>",
        "{}<start_function_response>",
        "",
    ),
    "phi4_mini": (
        lambda name, arguments: f"<|tool_call|>[{json.dumps({'name': name, 'arguments': arguments})}]<|/tool_call|>",
        "{}",
        "",
    ),
}
TAKEN = [
    {},
    {"city": 'He said "hi" \\ {ok}'},
    {"city": "München 🙂 漢\n\t."},
    {"days": 3, "exact": True},
    {"places": ["x", 2, [], {"a": {"b": [1, None]}}]},
    {"city": "</tool_call> [TOOL_CALLS] {"},
    {"city": "a </think> b"},
    {"city": ""},
]


@pytest.mark.parametrize("name", WRITTEN_BY)
def test_calls_as_a_family_of_models_writes_them(name):
    write, around, between = WRITTEN_BY[name]
    for arguments in TAKEN:
        parsed = FORMATS[name](around.replace("{}", write("weather", arguments)), [WEATHER])
        assert parsed == ([ToolCall("weather", arguments)], ""), arguments
    several = between.join((write("weather", {"city": "A"}), write("add", {}), write("get.time-1", {"city": "B"})))
    calls = [ToolCall("weather", {"city": "A"}), ToolCall("add", {}), ToolCall("get.time-1", {"city": "B"})]
    assert FORMATS[name](around.replace("{}", several), [WEATHER]).calls == calls
    call = around.replace("{}", write("weather", {"city": "A"}))
    assert FORMATS[name](f"hm</think>\n{call}", [WEATHER]).calls == [ToolCall("weather", {"city": "A"})]
    assert FORMATS[name]("It is 4.", [WEATHER]) == ([], "It is 4.")
    if name != "gpt-oss":  # whose thoughts and texts are messages
        assert FORMATS[name](f"I could {call}.\n</think>It is 4.", [WEATHER]) == ([], "It is 4.")
        assert FORMATS[name](f"So: {call}", [WEATHER]) == ([ToolCall("weather", {"city": "A"})], "So:")
    (broken,) = FORMATS[name](call[: call.rindex("A") + 1], [WEATHER]).calls
    assert isinstance(broken, BadCall)


SEP = DEEPSEEK("sep")
PHI = '{"name": "g", "parameters": {}}'
PYTHON_CALL = ToolCall("f", {"a": "it's", "b": -1500.0, "c": None, "d": {"e": True}})
PYTHON_CALLS = [ToolCall("f", {"a": "x\ny", "b": "\\d'\n"}), ToolCall("g", {"class": [1, "a"]})]
GEMMA_ARGUMENTS = {"x": 1, "call": {"a": 1}}
_lfm2 = "<|tool_call_start|>{}<|tool_call_end|>".format
LIST = '[{"name": "f", "arguments": {"x": "[TOOL_CALLS]"}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]'


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("mistral", f"[TOOL_CALLS] {LIST}", [ToolCall("f", {"x": "[TOOL_CALLS]"}), ToolCall("g", {})], ""),
        ("mistral", '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}', [ToolCall("f", {"x": 1}), ToolCall("g", {})], ""),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', [ToolCall("f", {"x": 1})], ""),
        ("mistral", "[THINK][TOOL_CALLS]f{}[/THINK]It is 4.", [], "It is 4."),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [ToolCall("f", {"x": 1})], ""),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}} Bye.', [ToolCall("f", {})], "Bye."),
        ("llama3_json", '{"parameters": {"x": {"y": {}}}, "name": "f"}', [ToolCall("f", {"x": {"y": {}}})], ""),
        ("llama3_json", '{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"a": {"b": 1}}', [], '{"a": {"b": 1}}'),
        ("gpt-oss", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', [ToolCall("f", {"x": 1})], ""),
        ("gpt-oss", "<|channel|>analysis to=functions.f code<|message|>{}", [ToolCall("f", {})], ""),
        ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4", [], "4"),
        (
            "deepseek_v3",
            f'{DEEPSEEK("call▁begin")}f{SEP}{{"x": 1}}{DEEPSEEK("call▁end")}',
            [ToolCall("f", {"x": 1})],
            "",
        ),
        ("kimi_k2", "<|tool_call_begin|>f:1<|tool_call_argument_begin|><|tool_call_end|>", [ToolCall("f", {})], ""),
        ("glm45", "<tool_call>f</tool_call>", [ToolCall("f", {})], ""),
        ("glm45", "<tool_call>f\n</tool_call><|observation|>", [ToolCall("f", {})], ""),
        ("lfm2", _lfm2("""f(a="it's", b=-1.5e3, c=None, d={"e": true})"""), [PYTHON_CALL], ""),
        ("lfm2", _lfm2("[f(a='x\ny', b='\\d\\'\\n'), g(class=[1, 'a'])]"), PYTHON_CALLS, ""),
        ("lfm2", _lfm2('[{"name": "f", "arguments": {"x": "\\u00e9"}}]'), [ToolCall("f", {"x": "é"})], ""),
        ("gemma4", "<|channel>thought\n<|tool_call>call:g{}<tool_call|><channel|>It is 4.", [], "It is 4."),
        ("gemma4", '<|tool_call>call:f{<|"|>x<|"|>:1,call:{a:1}}<tool_call|>', [ToolCall("f", GEMMA_ARGUMENTS)], ""),
        (
            "phi4_mini",
            f'functools[{{"name": "f", "arguments": {{}}}}, {PHI}]',
            [ToolCall("f", {}), ToolCall("g", {})],
            "",
        ),
        (
            "phi4_mini",
            f"<|tool_call|>{PHI}<|/tool_call|>\n<|tool_call|>{PHI}<|/tool_call|>",
            [ToolCall("g", {})] * 2,
            "",
        ),
        ("phi4_mini", f"<|tool_call|>[{PHI}]", [ToolCall("g", {})], ""),
        ("phi4_mini", "functools[0] of Python", [], "functools[0] of Python"),
    ],
)
def test_other_ways_in_which_a_family_writes_calls(name, text, calls, content):
    assert FORMATS[name](text, []) == (calls, content)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("mistral", "[TOOL_CALLS] []", 'the call has no "name"'),
        ("mistral", "[TOOL_CALLS]", "it must be NAME[ARGS], then a JSON object"),
        ("mistral", '[TOOL_CALLS]f[ARGS]["x"]', '"arguments" must be a JSON object'),
        ("llama3_json", "<|python_tag|>print(1)", "it is not valid JSON"),
        ("llama3_json", '{"name": "f", "parameters": {"x": }}', "it is not valid JSON"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{", "it is not valid JSON"),
        ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "it must be NAME, then only <arg_key>"),
        ("minimax", '<invoke name="f"><x></invoke>', 'it must be <invoke name="NAME">'),
        ("kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "it must be functions.NAME:N"),
        ("lfm2", _lfm2("[f(x=g())]"), "it must be [NAME(NAME=VALUE, ...)], as in Python"),
        ("lfm2", _lfm2("[f('x')]"), "it must be [NAME("),
        ("lfm2", _lfm2("[f(x='it's')]"), "it must be [NAME("),
        ("lfm2", _lfm2("[f(x='\\x1')]"), "it must be [NAME("),
        ("lfm2", _lfm2("[f(x=1, x=2)]"), '"x" is there twice'),
        (
            "gemma4",
            '<|tool_call>call:f{x:<|"|>y}<tool_call|>',
            "it must be call:NAME{NAME:VALUE,...}, texts as <",
        ),
        ("gemma4", "<|tool_call>call:f{x:y}<tool_call|>", "it must be call:NAME{"),
        ("deepseek_v3", f"{DEEPSEEK('call▁begin')}f{{}}{DEEPSEEK('call▁end')}", "it must be function"),
    ],
)
def test_a_bad_call_of_a_family_has_a_reason(name, text, reason):
    (call,) = FORMATS[name](text, []).calls
    assert isinstance(call, BadCall) and call.reason.startswith(reason)


@pytest.mark.parametrize("read", BUILT_IN.values())
@pytest.mark.parametrize("text", ["\n", '{"name": "f" ', "</think>"])
def test_a_policy_that_repeats_itself_is_read_in_the_time_of_its_text(read, text):
    """Else its turn would hold up all episodes of the process for minutes."""
    assert not read(text * (200_000 // len(text)), []).calls


@pytest.mark.parametrize("text", ["-", "a ", "call:f{", "f(x=", "f('", "'\\'", '<|"|>', "[f(", "x:", "{", "\\"])
@pytest.mark.parametrize(
    "between", ["<|tool_call>call:f{{x:{}<tool_call|>", "<|tool_call_start|>[f(x={}<|tool_call_end|>"]
)
def test_a_policy_that_repeats_itself_in_a_call_is_read_in_the_time_of_its_text(text, between):
    name = "gemma4" if "call:f" in between else "lfm2"
    assert len(FORMATS[name](between.format(text * (100_000 // len(text))), []).calls) == 1
