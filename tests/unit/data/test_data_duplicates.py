"""Which prompts count as the same."""

from typing import Any

from valor.data.duplicates import bare_questions, repeats, same_text, shared_prompts


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def asked(first: int) -> list[str]:
    """30 questions of which the words at both ends differ."""
    words = ["What", "How much"] * 15
    return [f"{word} is the number of cats in {i} sacks{'.?'[i % 2]}" for i, word in enumerate(words, first)]


def test_capitals_white_space_and_composition_do_not_matter() -> None:
    assert same_text(chat("What  is\nX? ")) == same_text(chat("what is x?"))
    assert same_text(chat("caf\u00e9")) == same_text(chat("cafe\u0301"))
    assert same_text(chat("x + 1")) != same_text(chat("x - 1"))
    assert same_text(chat("x²")) != same_text(chat("x2"))
    assert same_text([{"role": "system", "content": "a"}, *chat("b")]) != same_text(chat("b"))
    assert repeats(["a", "b", "a", "a"]) == [[0, 2, 3]]


def test_the_instruction_around_a_question_is_left_aside() -> None:
    prompts = [chat(f"Question: {question} Think first.") for question in asked(0)]
    assert bare_questions(prompts, ["a"] * 30)[7] == "how much is the number of cats in 7 sacks?"
    assert bare_questions(prompts[:10], ["a"] * 10)[7].startswith("question: how much")  # too few to know
    assert bare_questions(prompts, ["a", "b"] * 15)[7].startswith("question: how much")  # so has each source
    short = [chat(f"Square {i} please.") for i in range(30)]
    assert bare_questions(short, ["a"] * 30)[7] == "square 7 please."  # 7 alone says too little


def test_prompts_of_two_files() -> None:
    train = [chat(f"{question} Box it.") for question in asked(0)]
    test = [chat(f"Q: {question}") for question in asked(28)]
    assert shared_prompts(train, ["a"] * 30, test, ["b"] * 30) == [(28, 0), (29, 1)]
    assert shared_prompts(train, ["a"] * 30, train[:1], ["b"]) == [(0, 0)]
    assert shared_prompts(train, ["a"] * 30, [chat(f"Q: {question}") for question in asked(27)], ["b"] * 30) == []
