"""Prompts and responses joined into the rows a causal model reads."""

import pytest
import torch

from valor.models.rows import compact_rows

ROWS = {
    "prompts": torch.tensor([[11, 12, 0], [21, 0, 0]]),
    "prompt_lengths": torch.tensor([2, 1]),
    "responses": torch.tensor([[31, 32, 33], [41, 0, 0]]),
    "response_lengths": torch.tensor([3, 1]),
}


def test_rows_are_joined_without_gap_and_without_the_last_token():
    compact = compact_rows(ROWS)
    assert compact.input_ids.tolist() == [[11, 12, 31, 32], [21, 41, 0, 0]]


def test_predictors_and_targets_are_aligned():
    compact = compact_rows(ROWS)
    # Row 0: tokens 31, 32, 33 are predicted at positions 1, 2, 3; row 1 (offset 4): token 41 at position 0.
    assert compact.predictor.tolist() == [1, 2, 3, 4]
    assert compact.targets.tolist() == [31, 32, 33, 41]
    assert compact.mask.tolist() == [[True, True, True], [True, False, False]]


def test_gather_and_scatter_are_inverse_on_response_tokens():
    compact = compact_rows(ROWS)
    states = torch.arange(8.0).view(2, 4, 1)
    flat = compact.gather(states).squeeze(-1)
    assert flat.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert compact.scatter(flat).tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]


def test_rows_without_any_response_token():
    rows = {**ROWS, "response_lengths": torch.tensor([0, 0])}
    compact = compact_rows(rows)
    assert compact.input_ids.shape == (2, 1)
    assert compact.scatter(torch.zeros(0)).tolist() == [[0.0] * 3] * 2


def test_a_row_without_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt token"):
        compact_rows({**ROWS, "prompt_lengths": torch.tensor([2, 0])})
