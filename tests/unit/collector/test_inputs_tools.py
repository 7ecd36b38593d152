"""What a run with tools is told at its start: whether the reward model reads their schemas, and who reads the calls."""

import pytest

from tiny_reward_models import TEMPLATE, character_tokenizer
from valor.agents.chat import format_of
from valor.collector.inputs import _ask_format, _shows_tools
from valor.config import PPOConfig
from valor.data.templates import written_call


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (None, False),
        (TEMPLATE, False),
        ("{{ raise_exception('no') }}", False),
        ("{{ tools | tojson }}" + TEMPLATE, True),
    ],
)
def test_a_template_shows_tools_leaves_them_out_or_refuses(template, shown):
    tokenizer = character_tokenizer() if template is None else character_tokenizer(template=template)
    assert _shows_tools(tokenizer) is shown


def with_calls(written):
    return TEMPLATE + "{% for m in messages %}{% for c in m.tool_calls %}" + written + "{% endfor %}{% endfor %}"


JSON_CALL = """{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}}"""
JOINED = "{{ '<call>' + c.function.name + '<sep>' + c.function.arguments }}"  # DeepSeek: arguments have to be text


@pytest.mark.parametrize(
    ("written", "style", "said"),
    [
        (f"<tool_call>{JSON_CALL % 'arguments'}</tool_call>", "hermes", None),
        ("<tool_call><function={{ c.function.name }}></function></tool_call>", "qwen3_coder", None),
        ("", "hermes", None),
        (JSON_CALL % "parameters", "hermes", '{"name": "Probe7", "parameters": {}}'),
        (JOINED, "qwen3_coder", "<call>Probe7<sep>{}"),
        ("<tool_call>{{ c.function.name }}\n</tool_call>", "hermes", "<tool_call>Probe7 </tool_call>"),
    ],
    ids=["hermes", "coder", "none", "llama", "deepseek", "glm"],
)
def test_a_format_that_does_not_read_the_templates_calls_is_told(written, style, said, caplog):
    settings = {"actor_rollout_ref": {"rollout": {"multi_turn": {"format": style}}}}
    _ask_format(character_tokenizer(template=with_calls(written)), PPOConfig.model_validate(settings))
    assert caplog.messages == [] if said is None else f"format={style} does not read calls as" in caplog.text
    assert said is None or said in caplog.text


GEMMA_CALL = "<|tool_call>call:{{ c.function.name }}{{ '{}' }}<tool_call|><|tool_response>"


@pytest.mark.parametrize(
    ("written", "token", "name"),
    [
        ("", "<|tool_call_start|>", "lfm2"),
        ("", "<|tool_call|>", "phi4_mini"),
        ("", "<|im_start|>", "hermes"),
        (JSON_CALL % "arguments", "<|tool_call|>", "phi4_mini"),
        (JSON_CALL % "arguments", "<|im_start|>", "llama3_json"),
        (f"<tool_call>{JSON_CALL % 'arguments'}</tool_call>", "<|tool_call|>", "hermes"),
        ("<|tool_call_start|>[{{ c.function.name }}()]<|tool_call_end|>", "<|im_start|>", "lfm2"),
        (GEMMA_CALL, "<|im_start|>", "gemma4"),
        ("<tool_call>{{ c.function.name }}\n</tool_call><|observation|>", "<|im_start|>", "glm"),
        (JOINED, "<|tool_call|>", None),
    ],
)
def test_a_template_that_writes_no_calls_has_the_format_of_its_tokens(written, token, name, caplog):
    calls = f"{{% for c in m.tool_calls %}}{written}{{% endfor %}}</s>"
    tokenizer = character_tokenizer(template=f"{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}")
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    assert format_of(tokenizer, written_call(tokenizer)) == name
    _ask_format(tokenizer, PPOConfig())
    assert (f"they are read as rollout.multi_turn.format={name}" in caplog.text) is (not written)
