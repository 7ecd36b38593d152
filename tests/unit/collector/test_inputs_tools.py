"""Whether a reward model's template shows the schemas of tools, which is told at the start of a run."""

import pytest

from tiny_reward_models import TEMPLATE, character_tokenizer
from valor.collector.inputs import _shows_tools


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
