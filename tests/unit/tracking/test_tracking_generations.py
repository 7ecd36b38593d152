"""Sample generations: the file, and token strings for tokenizers that split characters and hide blanks."""

import json
import math

import numpy as np

from valor.tracking.generations import Sample, token_strings, write_samples


def test_samples_round_trip(tmp_path):
    sample = Sample(
        prompt="2+2=",
        tokens=["4", "<eos>"],
        reward=1.0,
        ground_truth="4",
        finish_reason="stop",
        mask=[1, 0],
        advantages=[1 / 3, math.nan],
        values=np.array([0.25, 0.5], dtype=np.float32),  # type: ignore[arg-type]
        reward_info={"length": np.int64(3), "exact": 1234567.875},
    )
    path = write_samples(tmp_path, 7, [sample, sample])
    assert path == tmp_path / "samples" / "step_7.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == second
    assert first["step"] == 7 and first["split"] == "train"
    assert first["tokens"] == ["4", "<eos>"]
    assert first["advantages"] == [0.333333, None]
    assert first["values"] == [0.25, 0.5]
    assert first["log_probs"] is None
    assert first["mask"] == [1, 0] and isinstance(first["mask"][0], int)
    assert first["reward_info"] == {"length": 3, "exact": 1234567.875}


def test_a_second_write_of_a_step_replaces_the_first(tmp_path):
    write_samples(tmp_path, 1, [Sample("a", ["b"], 0.0)] * 3)
    path = write_samples(tmp_path, 1, [Sample("c", ["d"], 1.0)])
    assert len(path.read_text().splitlines()) == 1
    assert write_samples(tmp_path, 1, [], split="val").name == "val_step_1.jsonl"


def bytes_decoder(pieces: list[bytes]):
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")


def test_characters_spread_over_tokens_stay_whole():
    pieces = [b"ok ", *(bytes([b]) for b in "🙂".encode()), "é".encode()[:1], "é".encode()[1:], b"!"]
    strings = token_strings(list(range(len(pieces))), bytes_decoder(pieces))
    assert strings == ["ok ", "", "", "", "🙂", "", "é", "!"]


def test_tokens_that_end_in_the_middle_of_a_character_show_what_is_whole():
    text = "日本語".encode()
    pieces = [text[:4], text[4:5], text[5:7], text[7:]]
    assert token_strings(list(range(4)), bytes_decoder(pieces)) == ["日", "", "本", "語"]


def test_an_unfinished_character_at_the_end_is_shown():
    pieces = [b"a", "🙂".encode()[:2]]
    assert token_strings([0, 1], bytes_decoder(pieces)) == ["a", "\ufffd"]


def test_bytes_that_never_become_text_do_not_swallow_what_follows():
    pieces = [b"\xff"] * 300 + [b"end"]
    assert "".join(token_strings(list(range(301)), bytes_decoder(pieces))) == "\ufffd" * 300 + "end"


def test_blanks_hidden_at_the_start_of_a_text_are_kept():
    pieces = ["\u2581two", "\u2581words", "s"]

    def decode(ids):  # sentencepiece: the mark is a blank, except at the start of a text
        return "".join(pieces[i] for i in ids).replace("\u2581", " ").removeprefix(" ")

    assert token_strings([0, 1, 2, 0], decode) == ["two", " words", "s", " two"]
    assert token_strings([], decode) == []
