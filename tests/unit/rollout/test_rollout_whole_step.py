"""A decode step in one compiled loop against the same step by parts, and against the models' own forward pass."""

from typing import Any

import pytest
import torch
import transformers as tf
from rollout_models import SIZES, random_model

from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.native import compiled, decoder, whole_step
from valor.rollout.native.engine import NativeEngine
from valor.rollout.native.loops import exponential
from valor.rollout.native.vectors import compiled as compiled_loop

SIZE = {**SIZES, "head_dim": 8, "vocab_size": 131}  # neither a panel nor a multiple of eight
FAMILIES: dict[str, Any] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZE)),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SIZE | {"num_attention_heads": 14})),  # seven heads read one key
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**SIZE, sliding_window=None)),
}
BY_PARTS: dict[str, Any] = {
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZE)),
    "gemma": (tf.GemmaForCausalLM, tf.GemmaConfig(**SIZE, hidden_activation="gelu_pytorch_tanh")),
}


def noisy(family: str) -> tf.PreTrainedModel:
    """All weights are noise, those of norms and biases too."""
    kind, config = (FAMILIES | BY_PARTS)[family]
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(mean=0.0 if weight.dim() > 1 else 0.5, std=0.2)
    return model.eval()


def generated(model: torch.nn.Module) -> list[Output]:
    """Sampled answers of unequal lengths to prompts of unequal lengths; rows join and leave."""
    params = [SamplingParams(max_tokens=length) for length in (1, 30, 2, 70, 40, 64, 5, 7, 9)]
    work = [Request(str(i), [3 + i % 3, 7, 11] * (1 + i % 4), one, (0, i)) for i, one in enumerate(params)]
    return NativeEngine(model, eos_token_ids=[], max_num_seqs=7).generate(work)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all whole steps that are taken."""
    counted: list[int] = []
    real = whole_step.WholeStep.__call__

    def counting(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        counted.append(len(x))
        return real(self, x, *rest)

    monkeypatch.setattr(whole_step.WholeStep, "__call__", counting)
    return counted


@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_what_parts_and_the_model_itself_give(
    family: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = noisy(family)
    whole = generated(model)
    assert max(steps) == 7
    steps.clear()
    monkeypatch.setattr(decoder, "_MOST_WHOLE", 0)
    parts = generated(model)
    assert not steps
    for number, (one, other) in enumerate(zip(whole, parts, strict=True)):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        prompt = [3 + number % 3, 7, 11] * (1 + number % 4)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert one.log_probs == pytest.approx(own.tolist(), abs=1e-5)


def test_threads_and_rows_beside_a_row_change_only_rounding(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = noisy("qwen2"), SamplingParams(max_tokens=5)
    work = [Request(str(i), [3 + i % 5, 7, 11], params, (0, i)) for i in range(100)]

    def found(most: int) -> list[list[float]]:
        return [one.log_probs for one in NativeEngine(model, eos_token_ids=[], max_num_seqs=most).generate(work)]

    torch.set_num_threads(3)
    several = found(100)
    assert max(steps) == 100  # more than one thread takes at once
    torch.set_num_threads(1)
    near = [pytest.approx(row, abs=1e-5) for row in several]  # BLAS sums by processor, threads and rows
    assert found(100) == near
    monkeypatch.setattr(compiled, "_in_threads", lambda: None)
    torch.set_num_threads(2)
    assert found(100) == near
    assert found(11) == near


def test_other_models_go_by_parts(steps: list[int]) -> None:
    with torch.no_grad():
        uneven = noisy("qwen2")
        uneven.model.norm.variance_epsilon = 1e-2
    for model in (*map(noisy, BY_PARTS), uneven, random_model("llama").bfloat16(), random_model("gpt2")):
        generated(model)
    assert not steps


def test_weights_that_are_not_numbers_are_told_of() -> None:
    model = noisy("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 5] = float("nan")
    engine = NativeEngine(model, eos_token_ids=[])
    engine._direct = True  # as in a run whose weights diverge after the first generation
    with pytest.raises(RuntimeError, match="not finite"):
        engine.generate([Request("a", [3, 4], SamplingParams(max_tokens=4), (0,))])


def test_exponential() -> None:
    @compiled_loop
    def all_of(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = exponential(x[i])

    x = torch.linspace(-87, 88, 100_001)
    found = torch.empty_like(x)
    _called(all_of)(x.numpy(), found.numpy())
    torch.testing.assert_close(found.double(), x.double().exp(), rtol=5e-6, atol=0)
    near = x.abs() < 12
    torch.testing.assert_close(found[near].double(), x[near].double().exp(), rtol=5e-7, atol=0)
    ends = torch.tensor([-torch.inf, -200.0, 200.0, torch.inf, torch.nan])
    found = torch.empty_like(ends)
    _called(all_of)(ends.numpy(), found.numpy())
    assert found[:2].tolist() == [0.0, 0.0] and found[2:4].min() > 1e38 and found[4].isnan()


def _called(loop: Any) -> Any:
    """Loops have no entry from Python: here is one."""
    import numba

    return numba.njit(lambda x, out: loop(x, out))
