"""What is asked of a chat template before a run: what it keeps of a conversation, and with what it ends a turn."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from valor.data.templates import ask_template, end_of_turn, end_tokens, keeps, parts_of, template_text
from valor.errors import UserError
from valor.models.export import write_tokenizer

TEMPLATES = Path(__file__).parents[1] / "agents" / "chat_templates"
ALL = {"user", "assistant", "system", "tool", "tools", "tool_calls", "reasoning_content", "thoughts"}
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<|User|>", "<|Assistant|>"),
    *("<|end_of_sentence|>", "<|user|>", "<|start|>", "<|end|>", "<|return|>", "<start_of_turn>", "<end_of_turn>"),
]


def tokenizer_of(template: str, **options: Any) -> Any:
    """Bytes, special tokens, and added ones that are not special; the end token is none that a template writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(text, normalized=False) for text in ("</answer>", "<stop>", "\n\n")])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **{"eos_token": "<|endoftext|>", **options})
    fast.chat_template = template
    return fast


# What each style leaves out, what it refuses, and the token with which it ends a turn.
STYLES: dict[str, tuple[set[str], set[str], str | None]] = {
    "qwen2.5": ({"tool_calls", "reasoning_content"}, set(), "<|im_end|>"),
    "qwen3": ({"tool_calls", "reasoning_content"}, set(), "<|im_end|>"),
    "qwen3_thinking": (set(), set(), "<|im_end|>"),
    "llama3": ({"tools", "tool_calls", "reasoning_content"}, set(), "<|eot_id|>"),
    "smollm2": ({"tools", "tool_calls", "reasoning_content"}, set(), "<|im_end|>"),
    "opens_think": ({"tool_calls", "reasoning_content"}, set(), "<|im_end|>"),
    "deepseek_r1": ({"tools", "tool_calls", "reasoning_content", "thoughts"}, set(), "<|end_of_sentence|>"),
    "glm4": ({"tools", "tool_calls", "reasoning_content", "thoughts"}, set(), None),
    "gpt_oss": ({"tool_calls"}, set(), "<|return|>"),
    "gemma": ({"tools", "tool_calls", "reasoning_content"}, {"system", "tool"}, "<end_of_turn>"),
    "alpaca": ({"system", "tool", "tools", "tool_calls", "reasoning_content"}, set(), None),
}


@pytest.mark.parametrize("style", STYLES)
def test_what_a_template_keeps(style, caplog):
    tokenizer = tokenizer_of((TEMPLATES / f"{style}.jinja").read_text())
    lost, refused, end = STYLES[style]
    for part in ALL:
        if part in refused:
            with pytest.raises(UserError, match="the chat template refuses these messages"):
                keeps(tokenizer, part)
        else:
            assert keeps(tokenizer, part) == (part not in lost), part
    number = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert end_of_turn(tokenizer) == number
    assert end_tokens(tokenizer) == [one for one in (number, tokenizer.eos_token_id) if one is not None]
    with caplog.at_level(logging.WARNING):
        ask_template(tokenizer, ALL)
    told = [one.getMessage() for one in caplog.records]
    leaves_out = [line for line in told if line.startswith("the chat template leaves out")]
    assert len(leaves_out) == bool(lost) and ("tools (their schemas)" in str(leaves_out)) == ("tools" in lost)
    assert [line for line in told if "ends a turn with" in line and str(end) in line] == told[len(leaves_out) :]
    assert len(told) == len(leaves_out) + (end is not None)


def test_nothing_is_said_of_parts_that_a_run_does_not_have(caplog):
    tokenizer = tokenizer_of((TEMPLATES / "deepseek_r1.jinja").read_text(), eos_token="<|end_of_sentence|>")
    with caplog.at_level(logging.WARNING):
        ask_template(tokenizer, {"user", "assistant", "system", "end"}, needed=["tool"])
    assert not caplog.records


def test_arguments_that_a_template_does_not_read_are_told(caplog):
    """Such as enable_thinking for a template that calls it otherwise: the policy would think in silence."""
    tokenizer = tokenizer_of("{% if thinking %}t{% endif %}" + CHATML)
    given = {"enable_thinking": False, "thinking": True, "add_generation_prompt": False, "continue_final_message": True}
    with caplog.at_level(logging.WARNING):
        ask_template(tokenizer, set(), given, row_arguments=["tools", "thinking", "effort"])
    assert [one for one in caplog.messages if "does not read" in one] == [
        "the chat template does not read 'effort': it has no effect",
        "the chat template does not read 'enable_thinking': it has no effect; did you mean thinking?",
    ]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(
    ("behind", "end"),
    [
        ("<|im_end|>\n", "<|im_end|>"),
        ("<|end|>\n<|endoftext|>", "<|end|>"),  # Phi-3
        ("</answer><|im_end|>", "<|im_end|>"),
        (" \n<stop>\n", "<stop>"),
        ("\n\n", None),
        ("<|unknown|>", None),
        ("", None),
    ],
)
def test_the_end_of_a_turn(behind, end, caplog):
    tokenizer = tokenizer_of(CHATML.replace("END", behind))
    assert end_of_turn(tokenizer) == (None if end is None else tokenizer.convert_tokens_to_ids(end))
    with caplog.at_level(logging.WARNING):
        ask_template(tokenizer, {"end"})
    assert ("an end token behind the assistant's texts" in caplog.text) == (end is None)


@pytest.mark.parametrize(
    ("template", "needed", "words"),
    [
        ("{{ 'the same' }}", (), "leaves out what the user says"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", (), "leaves out what the user says"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            ("assistant",),
            "the assistant says",
        ),
        ("{% if %}", (), "refuses these messages"),
        ("{{ messages[0]['content'] ", (), "refuses these messages"),
        ("{{ raise_exception('no') }}", (), "no"),
        ("alpaca", ("tool",), "leaves out what tools answer"),
        ("gemma", ("tool",), "roles must alternate"),
    ],
)
def test_a_template_of_no_use_is_refused_in_one_line(template, needed, words):
    text = (TEMPLATES / f"{template}.jinja").read_text() if template.isalpha() else template
    with pytest.raises(UserError, match=words) as refusal:
        ask_template(tokenizer_of(text), set(), needed=needed)
    assert "\n" not in str(refusal.value).strip()


def test_template_arguments_are_passed_on():
    tokenizer = tokenizer_of(
        "{% for m in messages %}{% if m.role != 'system' or shown %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert keeps(tokenizer, "system", {"shown": True}) and not keeps(tokenizer, "system")


def test_parts_of_conversations():
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "</think>"},
        {"role": "assistant", "content": "", "tool_calls": [{}], "reasoning_content": None},
        {"role": "ipython", "content": "1"},
    ]
    assert parts_of([chat]) == {"system", "user", "assistant", "tool_calls"}
    more = [[{"role": "assistant", "content": "a</think>b", "reasoning_content": "c"}]]
    assert parts_of([chat, *more]) == {*parts_of([chat]), "thoughts", "reasoning_content"}


def test_a_template_is_text_or_a_file(tmp_path, monkeypatch):
    text = "{{ messages[0]['content'] }}"
    (tmp_path / "chat.jinja").write_text(f"{text}\n")
    (tmp_path / "plain").write_text(text)
    (tmp_path / "of_windows").write_text(text, encoding="utf-8-sig")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe{{")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("chat.jinja", "./chat.jinja", "~/chat.jinja", str(tmp_path / "chat.jinja")):
        assert template_text(given) == f"{text}\n"
    assert template_text("plain") == template_text("of_windows") == template_text(text) == text
    for given in (
        "other.jinja",
        "~/none.j2",
        ".",
        str(tmp_path),
        "binary.jinja",
        "~nobody_at_all/x",
        "words",
        "x" * 9999,
        "",
    ):
        with pytest.raises(UserError, match="no Jinja text, and no file that can be read") as refusal:
            template_text(given)
        assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("known", "eos", "named"),
    [
        (None, "<|im_end|>", "<|im_end|>"),
        ("<|im_end|>", "<|im_end|>", "<|im_end|>"),
        (None, "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
        ("<|endoftext|>", "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (["<|eot_id|>", "<|return|>"], "<|return|>", ["<|eot_id|>", "<|return|>", "<|im_end|>"]),
    ],
)
def test_an_export_names_every_end_token(known, eos, named, tmp_path):
    tokenizer = tokenizer_of(CHATML.replace("END", "<|im_end|>"), eos_token=eos)
    number = tokenizer.convert_tokens_to_ids
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, eos_token_id=None if known is None else number(known)
    )
    config.save_pretrained(tmp_path)
    write_tokenizer(tokenizer, tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert found["eos_token_id"] == number(named)
    assert (found["temperature"], found["top_k"]) == (0.6, 20) and (tmp_path / "tokenizer_config.json").exists()


def test_a_model_that_does_not_generate_gets_no_generation_config(tmp_path):
    write_tokenizer(tokenizer_of(CHATML), tmp_path)
    assert not (tmp_path / "generation_config.json").exists()
