"""What a run with tools is told at its start: whether the reward model reads their schemas, and who reads the calls."""

import pytest

from tiny_reward_models import TEMPLATE, character_tokenizer
from valor.collector.inputs import _ask_format, _shows_tools
from valor.config import PPOConfig


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
