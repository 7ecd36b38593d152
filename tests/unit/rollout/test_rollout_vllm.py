"""The vLLM engine against full forward passes of the model whose weights it was given."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from io import StringIO

import pytest
import torch
from stop_texts import assert_stopped, stopping_after
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from interruptions import aborted, assert_log_probs, resumed, served, teacher_forced
from valor.config import ModelConfig, RolloutConfig
from valor.engines.distributed import init_process_group, leave_process_group
from valor.errors import UserError
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Abort, Output, Request, RolloutEngine, SamplingParams, Span
from valor.rollout.native.engine import NativeEngine
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.spec import BuildContext

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPT = torch.randint(3, 151, (100,), generator=torch.Generator().manual_seed(1)).tolist()


def tiny(kind: str) -> PreTrainedModel:
    """The same weights every time, far from uniform distributions."""
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=kind == "tied"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def trained(model: PreTrainedModel, seed: int) -> None:
    """What an optimizer step does: every weight moves a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def sync(engine: RolloutEngine, model: PreTrainedModel, version: int) -> None:
    policy = PolicyModel(model)
    engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=version)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RolloutEngine]]:
    """An engine for a model (its directory holds no weights); a process has one, so another one ends the last."""
    running: dict[tuple, RolloutEngine] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def stop() -> None:
        while running:
            running.popitem()[1].close()
        leave_process_group()

    def make(model: PreTrainedModel, **settings: object) -> RolloutEngine:
        key = (type(model), model.config.tie_word_embeddings, str(settings))
        if key not in running:
            stop()
            directory = tmp_path_factory.mktemp("model")
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(directory)
            init_process_group("cpu")
            lengths = {"max_model_len": 160, "max_num_seqs": 16}
            config = RolloutConfig(**({"name": "vllm", "dtype": "float32"} | lengths | settings))
            context = BuildContext(config, ModelConfig(path=str(directory)), [2], torch.device("cpu"), None)
            running[key] = GENERATION_ENGINES["vllm"].build(context)
        return running[key]

    yield make
    stop()
    torch.set_num_threads(threads)


def requests(count: int = 6, **params: float) -> list[Request]:
    """Samples of three prompts that share most of their tokens."""
    params = SamplingParams(max_tokens=12, **params)
    return [Request(f"r{i}", PROMPT[: 100 - i % 3], params, (7, 1, i)) for i in range(count)]


def test_it_starts_where_what_is_printed_goes_to_no_file(start):
    """As in notebooks, and where a library's caller collects what it prints."""
    with redirect_stdout(StringIO()):
        engine = start(tiny("tied"), max_num_seqs=15)
    sync(engine, tiny("tied"), 1)
    assert [len(output.token_ids) for output in engine.generate(requests(2, temperature=0.0))] == [12, 12]


def until(output: Output, length: int) -> Output:
    """As if it had been aborted there."""
    spans = (Span(length, output.spans[0].weights_version),) if output.spans else ()
    return Output(output.request_id, output.token_ids[:length], output.log_probs[:length], "abort", spans)


def gap(model: PreTrainedModel, work: list[Request], outputs: list[Output]) -> Tensor:
    """|Δ log p| of all sampled tokens, between the engine and a full forward at the request's temperature."""
    gaps = []
    for request, output in zip(work, outputs, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits.float() / (request.params.temperature or 1.0)
        start = len(request.prompt_ids)
        expected = logits.log_softmax(-1)[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        gaps.append((expected - torch.tensor(output.log_probs)).abs())
    return torch.cat(gaps)


@pytest.mark.parametrize("kind", ["untied", "tied", "moe"])
def test_log_probs_are_the_trainers_after_every_update(kind, start):
    model = tiny(kind)
    engine = start(model)
    checksums = set()
    for version in range(4):
        sync(engine, model, version)
        assert engine.weights_version == version
        checksums.add(engine.weights_checksum)
        # The prompt is in the prefix cache from the round before, with the old weights' keys and values.
        work = requests(temperature=0.7)
        outputs = engine.generate(work)
        assert gap(model, work, outputs).max() < 1e-4
        trained(model, version)
        assert gap(model, work, outputs).max() > 1e-2  # with the next weights it would have been seen
    assert len(checksums) == 4


def test_cut_and_greedy_sampling_have_untruncated_log_probs(start):
    model = tiny("tied")
    engine = start(model)
    sync(engine, model, 0)
    # 40 requests of all kinds at once, more than there are slots: rows with parameters of their own come and go.
    kinds = [{"top_k": 3}, {"top_p": 0.5, "temperature": 1.3}, {"temperature": 0.0}, {"temperature": 0.7}]
    mixed = [replace(r, request_id=f"{i}.{r.request_id}") for i, kind in enumerate(kinds) for r in requests(10, **kind)]
    for work in [requests(**kind) for kind in kinds] + [mixed[::3] + mixed[1::3] + mixed[2::3]]:
        outputs = engine.generate(work)
        assert gap(model, work, outputs).max() < 1e-4
        for request, output in zip(work, outputs, strict=True):
            assert set(output.token_ids) <= allowed(model, request, output)


def allowed(model: PreTrainedModel, request: Request, output: Output) -> set[int]:
    """The tokens that truncation leaves at the places where they were sampled; others become -1."""
    params, start = request.params, len(request.prompt_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *output.token_ids]]), use_cache=False).logits[0]
    left = set()
    for token, row in zip(output.token_ids, logits[start - 1 : -1], strict=True):
        probs = (row / (params.temperature or 1.0)).softmax(-1)
        more_likely = probs[probs > probs[token]]
        best = len(more_likely) < (1 if params.greedy else params.top_k if params.top_k > 0 else 151)
        left.add(token if best and more_likely.sum() < params.top_p else -1)
    return left


def test_a_sample_follows_its_seed_alone(start):
    model = tiny("tied")
    engine = start(model)
    sync(engine, model, 0)
    work = requests(12)
    together = engine.generate(work)
    alone = [engine.generate([request])[0] for request in work[:3]]
    backwards = engine.generate(work[::-1])[::-1]
    assert [o.token_ids for o in together[:3]] == [o.token_ids for o in alone]
    assert [o.token_ids for o in together] == [o.token_ids for o in backwards]
    assert len({tuple(o.token_ids) for o in together}) == 12
    native = NativeEngine(model, eos_token_ids=[2]).generate(work)
    assert [o.token_ids for o in together] == [o.token_ids for o in native]
    first = [Request(str(i), PROMPT[:40], SamplingParams(max_tokens=1), (3, i)) for i in range(1500)]
    counts = torch.bincount(torch.tensor([o.token_ids[0] for o in engine.generate(first)]), minlength=151)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT[:40]])).logits[0, -1].softmax(-1) * 1500
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    assert statistic < int(common.sum()) + 4 * (2 * int(common.sum())) ** 0.5


def test_sequences_end_where_they_should(start):
    model = tiny("tied")
    engine = start(model)
    sync(engine, model, 0)
    endless = [Request(str(i), PROMPT[:20], SamplingParams(max_tokens=30, ignore_eos=True), (i,)) for i in range(8)]
    whole = engine.generate(endless)
    assert {(o.finish_reason, len(o.token_ids), len(o.log_probs)) for o in whole} == {("length", 30, 30)}
    stop = whole[0].token_ids[4]
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    stopped = engine.generate([Request("0", PROMPT[:20], params, (0,))])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole[0].token_ids[: whole[0].token_ids.index(stop) + 1]
    with pytest.raises(UserError, match="160"):
        engine.generate([Request("long", [5] * 160)])


def test_a_text_ends_a_sequence_as_in_the_native_engine(start):
    model = tiny("tied")
    engine, native = start(model), NativeEngine(model, eos_token_ids=[2])
    sync(engine, model, 0)
    work = [Request(str(i), PROMPT[:20], SamplingParams(max_tokens=20), (i,)) for i in range(12)]
    free = native.generate(work)
    for length in (1, 3):
        stop, stopping = stopping_after(work, free, length)
        assert_stopped(engine.generate(stopping), free, stop)
        assert [o.token_ids for o in native.generate(stopping)] == [o.token_ids for o in engine.generate(stopping)]


def test_an_aborted_sequence_goes_on_as_if_nothing_had_been(start):
    """Also those that wait for one of the 16 places."""
    model = tiny("tied")
    engine = start(model)
    sync(engine, model, 3)
    work = requests(20, ignore_eos=True)  # none ends before it is aborted
    whole = engine.generate(work)
    cut = served(engine, work, aborted(work), at=6)
    assert {o.finish_reason for o in cut} == {"abort"}
    lengths = [len(o.token_ids) for o in cut]
    assert min(lengths) == 0 and 1 < max(lengths) < 12
    for request, had, after, before in zip(work, cut, engine.generate(resumed(work, cut)), whole, strict=True):
        assert had.token_ids == before.token_ids[: len(had.token_ids)]
        assert (after.token_ids, after.finish_reason, after.spans) == (
            before.token_ids,
            before.finish_reason,
            before.spans,
        )
        assert_log_probs(after, teacher_forced(model, request, after), 1e-4)
    first, *others = served(engine, work, lambda: [Abort("r0"), Abort("not there")])
    assert first.finish_reason == "abort" and [o.token_ids for o in others] == [o.token_ids for o in whole[1:]]


def test_a_sequence_that_goes_on_with_other_weights_has_their_log_probs(start):
    old = tiny("tied")
    new = deepcopy(old)
    trained(new, 1)
    engine = start(old)
    sync(engine, old, 1)
    work = requests(20, ignore_eos=True)
    whole = engine.generate(work)  # and the prompts are cached
    sync(engine, new, 2)
    for request, output in zip(work, engine.generate(resumed(work, [until(o, 5) for o in whole])), strict=True):
        assert output.spans == (Span(5, 1), Span(7, 2))
        expected = torch.cat([teacher_forced(old, request, output)[:5], teacher_forced(new, request, output)[5:]])
        assert_log_probs(output, expected, 1e-4)


def test_a_text_that_begins_before_an_abort_ends_the_sequence_behind_it(start):
    model = tiny("tied")
    engine, native = start(model), NativeEngine(model, eos_token_ids=[2])
    sync(engine, model, 0)
    work = [Request(str(i), PROMPT[:20], SamplingParams(max_tokens=20), (i,)) for i in range(6)]
    free = native.generate(work)
    stop, stopping = stopping_after(work, free, 3)
    assert_stopped(engine.generate(resumed(stopping, [until(o, 9) for o in (*free, free[1])])), free, stop)


def test_a_source_that_fails_leaves_nothing_behind(start):
    model = tiny("tied")
    engine = start(model)
    sync(engine, model, 0)
    work = requests()

    def fail() -> Sequence[Request | Abort]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        served(engine, work, fail)
    assert gap(model, work, engine.generate(work)).max() < 1e-4
    assert not engine._running and not engine._llm.has_unfinished_requests()


def test_weights_that_did_not_arrive_are_noticed(start, monkeypatch):
    model = tiny("tied")
    engine = start(model)
    sync(engine, model, 0)
    policy = PolicyModel(model)

    def weights() -> dict[str, Tensor]:
        return dict(published_weights(policy, policy.state_dict().items()))

    with pytest.raises(RuntimeError, match="the engine holds"):
        engine.sync_weights(((k, v) for k, v in weights().items() if k != "model.norm.weight"), version=1)
    with pytest.raises(ValueError, match="no weights"):
        engine.generate(requests(1))
    trained(model, 1)
    from valor.rollout.vllm import internals

    with monkeypatch.context() as patched:  # the packed copies stay behind, as they do in vLLM's own reload
        patched.setattr(internals.layer_utils, "dispatch_cpu_unquantized_gemm", lambda *a, **k: None)
        with pytest.raises(RuntimeError, match="packed"):
            sync(engine, model, 2)
    trained(model, 2)
    held = engine._held._model
    with monkeypatch.context() as patched:  # a loader that leaves one value as it was

        def forgetful(weights, load=held.load_weights):
            norm = held.model.norm.weight
            before = float(norm[0])
            names = load(weights)
            norm.data[0] = before
            return names

        patched.setattr(held, "load_weights", forgetful)
        with pytest.raises(RuntimeError, match="the engine holds"):
            sync(engine, model, 3)
    sync(engine, model, 4)
    work = requests()
    assert gap(model, work, engine.generate(work)).max() < 1e-4


def test_bfloat16_is_within_bfloat16_noise(start):
    model = tiny("untied")
    engine = start(model, dtype="bfloat16")
    sync(engine, model, 0)
    work = requests(12)
    gaps = gap(model.bfloat16(), work, engine.generate(work))
    assert 0 < gaps.mean() < 0.1


def test_engine_options_reach_vllm(start):
    model = tiny("tied")
    engine = start(model, max_model_len=64, engine_kwargs={"vllm": {"block_size": 64}})
    assert engine._llm.vllm_config.cache_config.block_size == 64
    assert engine._llm.vllm_config.model_config.max_model_len == 64
    with pytest.raises(UserError, match="blok_size: vLLM has no such option; did you mean block_size"):
        start(model, engine_kwargs={"vllm": {"blok_size": 64}})


def test_experts_that_stay_behind_are_noticed(start, monkeypatch):
    from valor.rollout.vllm import internals

    model = tiny("moe")
    engine = start(model)
    sync(engine, model, 0)
    experts = engine._held._packed_experts[0]
    before = experts.w13_weight
    trained(model, 1)
    with monkeypatch.context() as patched:

        def forgetful(layer, pack=internals.pack_experts):
            pack(layer)
            if layer is experts:
                layer.w13_weight = before

        patched.setattr(internals, "pack_experts", forgetful)
        with pytest.raises(RuntimeError, match="experts of a RoutedExperts compute with other weights"):
            sync(engine, model, 1)
    sync(engine, model, 2)
    work = requests()
    assert gap(model, work, engine.generate(work)).max() < 1e-4


def test_a_model_whose_weights_cannot_be_written_in_place_is_refused(start, monkeypatch):
    """A kernel that rearranges the weights of experts, as some of those for GPUs do."""
    from valor.rollout.vllm import internals

    monkeypatch.setattr(internals, "_PLAIN_EXPERTS", ())
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM has RoutedExperts layers"):
        start(tiny("moe"), max_num_seqs=8)


def test_it_sleeps_until_it_is_given_weights(start, monkeypatch):
    """The models that are loaded after it need the memory; a CPU has no sleep, so it is asked whether it would."""
    from valor.rollout.vllm.engine import VLLMEngine

    slept: list[int | None] = []
    monkeypatch.setattr(VLLMEngine, "sleep", lambda self: slept.append(self.weights_version))
    start(tiny("tied"), max_num_seqs=15)  # no other test's engine
    assert slept == [None]
