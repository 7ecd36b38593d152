"""Packed rows of models whose layers see a window or a chunk, and of models with attention sinks: the numbers of each
row alone, by the model's own attention."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    Olmo3Config,
    Qwen2Config,
)

from tiny_sizes import SIZES
from valor.models.attention import Segments
from valor.models.classifier import register_classifier
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel
from valor.models.value import ValueModel

WINDOW = 5
BOTH = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKED = Llama4TextConfig(
    **SIZES,
    head_dim=8,
    attention_chunk_size=WINDOW,
    layer_types=["chunked_attention", "full_attention"],
    intermediate_size_mlp=48,
    num_local_experts=2,
    interleave_moe_layer_step=2,
    attn_temperature_tuning=False,
)
FAMILIES = [
    Gemma3TextConfig(**SIZES, **BOTH, head_dim=8, query_pre_attn_scalar=8),
    GptOssConfig(
        **SIZES,
        **BOTH,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    Olmo3Config(**SIZES, **BOTH),
    MistralConfig(**SIZES, sliding_window=WINDOW),
    Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    CHUNKED,
]


def _text(seed: int, count: int) -> list[int]:
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _column(parts: list[list[int]]) -> torch.Tensor:
    return torch.tensor([part + [0] * (max(map(len, parts)) - len(part)) for part in parts])


# A group of three with one prompt, one row that says nothing, one as long as the window, one of two windows and more.
PROMPTS = [_text(0, 12), _text(0, 12), _text(0, 12), _text(1, 3), _text(2, 3), _text(3, 2)]
RESPONSES = [_text(4, 9), _text(5, 2), _text(6, 7), [], _text(7, 3), _text(8, 15)]
ROWS = {
    "prompts": _column(PROMPTS),
    "prompt_lengths": torch.tensor([*map(len, PROMPTS)]),
    "responses": _column(RESPONSES),
    "response_lengths": torch.tensor([*map(len, RESPONSES)]),
}


def build(auto, config, **options):
    torch.manual_seed(0)
    hf = auto.from_config(copy.deepcopy(config))  # models change theirs
    with torch.no_grad():
        for name, weights in hf.named_parameters():
            if "sinks" in name or "score" in name:
                weights.normal_()
    return (PolicyModel if auto is AutoModelForCausalLM else ValueModel)(hf, **options)


def numbers(model, *parts) -> dict[str, torch.Tensor]:
    """Outputs, joined over calls with `parts` of the rows, and gradients of a loss that weighs each number apart."""
    calls = [model(part) for part in parts]
    out = {name: torch.cat([call[name] for call in calls]) for name in calls[0]}
    sum((value * torch.linspace(-1, 1, value.numel()).view_as(value)).sum() for value in out.values()).backward()
    return {**out, **{f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        most = 1e-4 * max(1.0, float(expected[name].abs().max())) if "grad" in name else 1e-5
        torch.testing.assert_close(value, expected[name], rtol=0, atol=most, msg=lambda text, n=name: f"{n}: {text}")


def alone(model) -> dict[str, torch.Tensor]:
    assert not model.packed
    return numbers(model, *({name: column[i : i + 1] for name, column in ROWS.items()} for i in range(len(PROMPTS))))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared prefixes"])
def test_a_policy_reads_packed_rows_as_it_reads_each_alone(config, shared):
    model = build(AutoModelForCausalLM, config, packed=True, shared=shared)
    assert model.packed and model.shared is shared
    assert_same(numbers(model, ROWS), alone(build(AutoModelForCausalLM, config)))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_a_value_model_does(config):
    register_classifier(AutoModelForTokenClassification, config, "a model")
    config = type(config)(**{**config.to_diff_dict(), "num_labels": 1})
    model = build(AutoModelForTokenClassification, config, packed=True, shared=True)
    assert model.shared
    found = numbers(model, ROWS)
    assert found["values"].abs().max() > 0.1
    assert_same(found, alone(build(AutoModelForTokenClassification, config)))


@pytest.mark.parametrize("config", [FAMILIES[1], CHUNKED], ids=lambda config: config.model_type)
def test_layers_that_are_computed_again_for_their_gradients_do(config):
    model = build(AutoModelForCausalLM, config, packed=True, shared=True)
    checkpoint_layers(model.hf)
    model.train()
    assert_same(numbers(model, ROWS), alone(build(AutoModelForCausalLM, config)))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_long_rows_do(config, monkeypatch):
    monkeypatch.setattr("valor.models.attention._SHORT", 0)  # so that they are long
    found = numbers(build(AutoModelForCausalLM, config, packed=True, shared=True), ROWS)
    assert_same(found, alone(build(AutoModelForCausalLM, config)))


def test_a_token_sees_its_window_and_no_further():
    config = MistralConfig(**{**SIZES, "num_hidden_layers": 1}, sliding_window=WINDOW)
    model = build(AutoModelForCausalLM, config, packed=True)
    with torch.no_grad():
        before = model(ROWS)["log_probs"]
        for column in (12 - WINDOW - 1, 12 - WINDOW):  # of the prompt of 12 tokens, whose last one predicts
            prompts = ROWS["prompts"].clone()
            prompts[:, column] = 9
            changed = model({**ROWS, "prompts": prompts})["log_probs"][0, 0] - before[0, 0]
            assert bool(changed.abs() > 1e-6) is (column == 12 - WINDOW)


def test_plain_calls_of_a_model_with_sinks_are_its_own():
    plain, packing = (build(AutoModelForCausalLM, FAMILIES[1], packed=packed).hf for packed in (False, True))
    assert packing.config._attn_implementation == "valor_packed" and plain.config._attn_implementation == "eager"
    mask = torch.ones_like(ROWS["prompts"])
    mask[1:3, :4] = 0  # padding to the left
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            expected, found = (hf(input_ids=ROWS["prompts"], **options).logits for hf in (plain, packing))
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)


def test_chunks_are_rows_that_are_cut():
    assert Segments.of([4, 7]).in_chunks(3) == Segments((0, 3, 4, 7, 10, 11))
    keys = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6])
    cut = Segments.of([4, 3]).reading([4, 7], keys).in_chunks(3)  # the second row begins with all of the first
    assert cut.bounds == (0, 3, 4, 4, 6, 7) and cut.key_bounds == (0, 3, 4, 7, 10, 11)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SIZES, **BOTH, head_dim=8, query_pre_attn_scalar=8), "soft cap"),
        (Llama4TextConfig(**{**CHUNKED.to_diff_dict(), "attn_temperature_tuning": True}), "attn_temperature_tuning"),
    ],
    ids=["gemma2", "llama4"],
)
def test_models_that_cannot_pack_stay_as_they_were_and_say_so(config, reason, caplog):
    plain, asked = (build(AutoModelForCausalLM, config, packed=packed) for packed in (False, True))
    assert not asked.packed and reason in caplog.text
    assert asked.hf.config._attn_implementation == plain.hf.config._attn_implementation
    assert asked.hf.config.to_dict() == plain.hf.config.to_dict()
    assert_same(numbers(asked, ROWS), numbers(plain, ROWS))
