"""Packed rows: the numbers of padded rows, forward and backward, and architectures that stay with padding."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen2ForTokenClassification

from tiny_sizes import SIZES
from valor.engines.microbatch import plan_micro_batches
from valor.models.attention import Segments
from valor.models.internals import checkpoint_layers
from valor.models.packing import IMPLEMENTATION
from valor.models.policy import PolicyModel
from valor.models.rows import compact_rows
from valor.models.value import ValueModel

# A row of one position, rows of one length beside each other, one without a response.
ROWS = {
    "prompts": torch.arange(5 * 4).view(5, 4) % 57 + 3,
    "prompt_lengths": torch.tensor([4, 2, 1, 3, 3]),
    "responses": torch.arange(5 * 6).view(5, 6) % 31 + 7,
    "response_lengths": torch.tensor([2, 6, 0, 5, 5]),
}


def causal_lm(config) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def numbers(model, **options) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a loss that weighs every position differently."""
    out = model(ROWS, **options)
    weights = torch.linspace(-1, 1, 30).view(5, 6)
    torch.stack([(value * weights).sum() for value in out.values() if value.requires_grad]).sum().backward()
    grads = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**{n: v.detach() for n, v in out.items()}, **grads}


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES, tie_word_embeddings=True), LlamaConfig(**SIZES)], ids=type)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_policy_reads_packed_rows_as_padded_ones(config, checkpointing):
    found = {}
    for packed in (False, True):
        model = PolicyModel(causal_lm(config), packed=packed)
        if checkpointing:
            checkpoint_layers(model.hf)
            model.train()
        assert model.packed is packed
        found[packed] = numbers(model, temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    assert {"log_probs", "entropy", "sum_pi_squared"} < found[True].keys() and len(found[True]) > 10
    assert_same(found[True], found[False])


def test_a_value_model_reads_packed_rows_as_padded_ones():
    found = {}
    for packed in (False, True):
        torch.manual_seed(0)
        model = ValueModel(Qwen2ForTokenClassification(Qwen2Config(**SIZES, num_labels=1)), packed=packed)
        found[packed] = numbers(model)
    assert found[True]["values"].abs().sum() > 0
    assert_same(found[True], found[False])


def test_the_model_sees_no_padding_at_all():
    model = PolicyModel(causal_lm(Qwen2Config(**SIZES)), packed=True)
    seen = []
    model.hf.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    with torch.no_grad():
        model(ROWS)
    assert seen == [(1, 5 + 7 + 1 + 7 + 7)]  # prompt + response - 1, and at least one


def test_packed_columns_by_hand():
    rows = compact_rows(ROWS, packed=True)
    assert rows.segments == Segments((0, 5, 12, 13, 20, 27))
    assert rows.position_ids.tolist() == [[*range(5), *range(7), 0, *range(7), *range(7)]]
    assert rows.predictor.tolist()[:8] == [3, 4, 6, 7, 8, 9, 10, 11]
    assert rows.input_ids[0, :5].tolist() == [3, 4, 5, 6, 7]


def test_a_plain_call_of_a_model_that_can_pack_is_unchanged():
    plain, packing = causal_lm(Qwen2Config(**SIZES)), PolicyModel(causal_lm(Qwen2Config(**SIZES)), packed=True).hf
    assert packing.config._attn_implementation == IMPLEMENTATION
    ids, mask = ROWS["responses"], torch.tensor([[1] * 6, [0, 1, 1, 1, 1, 1], [1] * 6, [0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            expected = plain(input_ids=ids, **options).logits
            found = packing(input_ids=ids, **options).logits
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-6)


def test_a_model_that_cannot_pack_stays_as_it_was_and_says_so(caplog):
    config = Qwen2Config(**SIZES, attn_implementation="eager")
    plain, asked = PolicyModel(causal_lm(config)), PolicyModel(causal_lm(config), packed=True)
    assert not asked.packed and "its attention is eager" in caplog.text
    assert asked.hf.config._attn_implementation == plain.hf.config._attn_implementation
    assert_same(numbers(asked), numbers(plain))


def test_a_packed_plan_counts_tokens_and_not_padding():
    lengths = [3, 10, 4, 9]
    assert plan_micro_batches(lengths, max_tokens=23, packed=True) == [[1, 3, 2], [0]]
    assert plan_micro_batches(lengths, max_tokens=23) == [[1, 3], [2, 0]]
    assert plan_micro_batches(lengths, max_tokens=5, packed=True) == [[1], [3], [2], [0]]
    assert plan_micro_batches([2, 2, 2], max_tokens=9, max_rows=2, packed=True) == [[0, 1], [2]]
