"""Tokens that several rows begin with, computed once: the numbers and gradients of rows that are computed whole."""

from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForTokenClassification,
    Qwen3Config,
)

from tiny_sizes import SIZES
from valor.engines.microbatch import RowOrder, plan_micro_batches
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel
from valor.models.rows import Sharing, compact_rows, in_families, model_inputs
from valor.models.value import ValueModel

FAMILIES = [
    Qwen2Config(**SIZES, tie_word_embeddings=True),
    Qwen3Config(**SIZES, head_dim=8),
    LlamaConfig(**SIZES),
    MistralConfig(**SIZES, sliding_window=None),
    GemmaConfig(**SIZES, head_dim=8),
    Phi3Config(**SIZES, pad_token_id=0),
]
P = 12


def rows_of(*texts: tuple[list[int], list[int]]) -> dict[str, torch.Tensor]:
    """Prompt and response of each row, right-padded."""
    columns = {}
    for name, parts in zip(("prompt", "response"), zip(*texts, strict=True), strict=True):
        width = max(1, *map(len, parts))
        columns[f"{name}s"] = torch.tensor([part + [0] * (width - len(part)) for part in parts])
        columns[f"{name}_lengths"] = torch.tensor([len(part) for part in parts])
    return columns


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B = tokens(0, P), tokens(1, P)
TURN = A + tokens(2, 5)  # what a second turn is asked begins with the first turn
ROWS = rows_of(
    (A, tokens(2, 5)),  # a group of four, two of one length, one that says nothing
    (A, tokens(3, 5)),
    (A, tokens(4, 2)),
    (A, []),
    (TURN + tokens(5, 3), tokens(6, 4)),
    (TURN + tokens(5, 3), tokens(7, 4)),
    (B, tokens(8, 6)),
    (B, tokens(8, 6)),  # the same once more
    (tokens(9, 3), tokens(10, 2)),  # alone
)


def ordered(rows):
    order, _ = in_families(*model_inputs(rows))
    return {name: column[order] for name, column in rows.items()}


def numbers(model, rows=None) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a loss that weighs every position differently."""
    out = model(ordered(ROWS) if rows is None else rows)
    weights = torch.linspace(-1, 1, 54).view(9, 6)
    sum((value * weights).sum() for value in out.values() if value.requires_grad).backward()
    grads = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**{n: v.detach() for n, v in out.items()}, **grads}


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        scale = float(expected[name].norm())
        assert float((value - expected[name]).norm()) <= (1e-5 if "grad" in name else 1e-6) * scale, name


def policy(config, **options) -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(config), packed=True, **options)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_policy_gives_the_same_numbers(config, checkpointing):
    found = {}
    for shared in (False, True):
        model = policy(config, shared=shared)
        if checkpointing:
            checkpoint_layers(model.hf)
            model.train()
        assert model.shared is shared
        found[shared] = numbers(model)
    assert len(found[True]) > 10
    assert_same(found[True], found[False])


def test_a_value_model_gives_the_same_numbers():
    found = {}
    for shared in (False, True):
        torch.manual_seed(0)
        hf = Qwen2ForTokenClassification(Qwen2Config(**SIZES, num_labels=1))
        found[shared] = numbers(ValueModel(hf, packed=True, shared=shared))
    assert found[True]["values"].abs().sum() > 0
    assert_same(found[True], found[False])


@pytest.mark.parametrize("filled_up", [0, 1], ids=["policy", "reference"])
def test_the_exact_kl_to_a_reference_whose_ranks_divide_rows_in_another_way(filled_up):
    models = [policy(FAMILIES[0], shared=True) for _ in range(2)]
    with torch.no_grad():
        models[1].hf.lm_head.weight.mul_(3)
        expected = models[0](ROWS, reference=partial(models[1], as_reference=True))["full_kl"]
        models[filled_up].sharing = Sharing(multiple=64)
        found = models[0](ROWS, reference=partial(models[1], as_reference=True))["full_kl"]
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected)


def test_a_token_that_rows_share_is_there_once():
    rows = compact_rows(ordered(ROWS), packed=True, shared=True)
    texts = set()  # every beginning of a row, the last token aside, which no model reads
    for p, r, n, m in zip(
        *(ROWS[f"{name}{of}"].tolist() for of in ("s", "_lengths") for name in ("prompt", "response")),
        strict=True,
    ):
        whole = (p[:n] + r[:m])[: n + m - 1]
        texts |= {tuple(whole[: i + 1]) for i in range(len(whole))}
    assert rows.input_ids.shape == (1, len(texts))
    assert rows.predictor.max() < len(texts) and len(rows.targets) == int(ROWS["response_lengths"].sum())
    whole = compact_rows(ordered(ROWS), packed=True)
    assert torch.equal(rows.input_ids[0, rows.predictor], whole.input_ids[0, whole.predictor])
    assert torch.equal(rows.position_ids[0, rows.predictor], whole.position_ids[0, whole.predictor])


def test_in_any_other_order_rows_share_with_the_row_before_them():
    found = {}
    for shared in (False, True):
        found[shared] = numbers(policy(FAMILIES[0], shared=shared), ROWS)
    assert_same(found[True], found[False])


def test_a_few_equal_tokens_are_not_shared():
    rows = rows_of((A[:7] + tokens(1, 5), tokens(2, 3)), (A[:7] + tokens(3, 5), tokens(4, 3)))
    assert compact_rows(rows, packed=True, shared=True).segments.keys is None
    assert in_families(*model_inputs(rows))[1] == [0, 0]


def test_families_stay_together_and_long_ones_come_first():
    order, shared = in_families(*model_inputs(ROWS))
    assert set(order[:6]) == set(range(6)) and abs(order.index(4) - order.index(5)) == 1 and order[6:] == [6, 7, 8]
    assert shared[0] == 0 and min(shared[1:6]) >= P - 1 and shared[6:] == [0, P + 5, 0]


def test_a_budget_counts_shared_tokens_once():
    lengths = [20, 20, 20, 20]
    order = RowOrder([0, 1, 2, 3], [0, 15, 15, 15])
    assert plan_micro_batches(lengths, order, max_tokens=35, packed=True) == [[0, 1, 2, 3]]
    assert plan_micro_batches(lengths, order, max_tokens=34, packed=True) == [[0, 1, 2], [3]]
    assert plan_micro_batches(lengths, order, max_tokens=25, packed=True) == [[0, 1], [2, 3]]
    assert plan_micro_batches(lengths, order, max_tokens=40) == [[0, 1], [2, 3]]
