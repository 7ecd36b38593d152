"""The native engine against independent computations with the same model: full forward, `generate`, other batches."""

import pytest
import torch
from rollout_models import ARCHITECTURES, random_model
from transformers import PreTrainedModel

from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.native import engine as native_engine
from valor.rollout.native.engine import NativeEngine

# Longer and shorter than the windows (8) and than the length from which prompts are shared.
PROMPT_LENGTHS = (1, 2, 7, 20, 41, 42)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def requests(samples: int, **params: float) -> list[Request]:
    """Samples of all prompts, each with a length limit of its own so that rows leave at different times."""
    return [
        Request(f"{i}.{j}", prompt, SamplingParams(max_tokens=6 + 3 * i + j, **params), (5, i, j))
        for i, prompt in enumerate(prompts())
        for j in range(samples)
    ]


def engine(model: PreTrainedModel, **options: int) -> NativeEngine:
    return NativeEngine(model, eos_token_ids=[], **options)


def full_forward(model: PreTrainedModel, request: Request, output: Output, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the sampled tokens without any cache, by the model's own eager attention."""
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.float() / temperature
    start = len(request.prompt_ids)
    return logits.log_softmax(-1)[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_agree_with_the_full_forward(name: str, samples: int) -> None:
    model = random_model(name)
    work = requests(samples, temperature=0.7)
    # Few slots: rows of different lengths leave and join all the time.
    for request, output in zip(work, engine(model, max_num_seqs=5).generate(work), strict=True):
        expected = full_forward(model, request, output, temperature=0.7)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2"])
def test_greedy_equals_generate(name: str) -> None:
    model = random_model(name)
    work = requests(1, temperature=0.0)
    outputs = engine(model).generate(work)
    for request, output in zip(work, outputs, strict=True):
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.params.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.filterwarnings("error::FutureWarning")
def test_no_argument_is_one_that_transformers_gives_up(qwen: PreTrainedModel) -> None:
    """`past_key_values` since 5.24; a warning of it would stand on the user's console."""
    engine(qwen).generate(requests(1, temperature=1.0))


def test_what_else_is_in_the_batch_does_not_matter(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    work = requests(3)
    together = engine(qwen).generate(work)
    alone = [engine(qwen).generate([request])[0] for request in work]
    monkeypatch.setattr(native_engine, "MAX_TOKENS", 50)
    shuffled = engine(qwen, max_num_seqs=4).generate(work[::-1])[::-1]
    for one, two, three in zip(together, alone, shuffled, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-5)
        assert one.log_probs == pytest.approx(three.log_probs, abs=1e-5)


def test_the_same_call_twice_gives_the_same_bits(qwen: PreTrainedModel) -> None:
    first, second = (engine(qwen, max_num_seqs=5).generate(requests(3)) for _ in range(2))
    assert first == second


def test_samples_of_one_prompt_differ_and_follow_their_seeds(qwen: PreTrainedModel) -> None:
    prompt = prompts()[4]
    params = SamplingParams(max_tokens=12)
    work = [Request(str(seed), prompt, params, (seed,)) for seed in (0, 1, 2, 3, 0)]
    outputs = [tuple(output.token_ids) for output in engine(qwen).generate(work)]
    assert len(set(outputs)) == 4
    assert outputs[0] == outputs[4]


def test_first_tokens_follow_the_model_distribution(qwen: PreTrainedModel) -> None:
    prompt, count = prompts()[3], 4000
    work = [Request(str(i), prompt, SamplingParams(max_tokens=1), (9, i)) for i in range(count)]
    outputs = engine(qwen, max_num_seqs=1000).generate(work)
    with torch.no_grad():
        probs = torch.softmax(qwen(torch.tensor([prompt])).logits[0, -1], dim=-1)
    observed = torch.bincount(torch.tensor([output.token_ids[0] for output in outputs]), minlength=61)
    expected = probs * count
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson-Hilferty: the 0.999 quantile of chi-square.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_bfloat16_weights_agree_within_bfloat16_noise() -> None:
    model = random_model("llama")
    work = requests(2)
    outputs = engine(model.bfloat16()).generate(work)
    gaps = []
    for request, output in zip(work, outputs, strict=True):
        gaps += (full_forward(model, request, output) - torch.tensor(output.log_probs)).abs().tolist()
    assert sum(gaps) / len(gaps) < 0.05
    assert max(gaps) > 0  # another order of roundings: identical bits would mean that nothing was compared
