"""Which prompts count as the same."""

from typing import Any

from valor.data.files import same_text


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_capitals_white_space_and_composition_do_not_matter() -> None:
    assert same_text(chat("What  is\nX? ")) == same_text(chat("what is x?"))
    assert same_text(chat("caf\u00e9")) == same_text(chat("cafe\u0301"))
    assert same_text(chat("x + 1")) != same_text(chat("x - 1"))
    assert same_text(chat("x²")) != same_text(chat("x2"))
    assert same_text([{"role": "system", "content": "a"}, *chat("b")]) != same_text(chat("b"))
