"""Behaviour of the native engine as an engine: stopping, limits, memory bounds, hooks, and leaving no trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_models import random_model
from stop_texts import assert_stopped, stopping_after
from transformers import PreTrainedModel

from valor.errors import UserError
from valor.rollout.base import Elsewhere, Output, Request, RolloutEngine, SamplingParams
from valor.rollout.native import decoder
from valor.rollout.native.engine import NativeEngine
from valor.tracking.progress import Phase, phase

PROMPT = [5, 9, 23, 40, 11]


def generate(model: PreTrainedModel, params: SamplingParams, eos: tuple[int, ...] = ()) -> Output:
    return NativeEngine(model, eos_token_ids=eos).generate([Request("a", PROMPT, params, (3,))])[0]


def batch(count: int, tokens: int = 8) -> list[Request]:
    return [Request(str(i), [*PROMPT, i], SamplingParams(max_tokens=tokens), (i,)) for i in range(count)]


def test_it_is_a_rollout_engine(qwen: PreTrainedModel) -> None:
    assert isinstance(NativeEngine(qwen, eos_token_ids=[2]), RolloutEngine)


def test_stops_at_the_first_end_token_and_keeps_it(qwen: PreTrainedModel) -> None:
    free = generate(qwen, SamplingParams(max_tokens=20))
    assert free.finish_reason == "length" and len(free.token_ids) == 20 == len(free.log_probs)
    end = free.token_ids[7]
    first = free.token_ids.index(end)
    unused = next(token for token in range(61) if token not in free.token_ids)
    by_eos = generate(qwen, SamplingParams(max_tokens=20), eos=(unused, end))
    stops = SamplingParams(max_tokens=20, stop_token_ids=(end,), ignore_eos=True)
    by_stop = generate(qwen, stops, eos=(free.token_ids[0],) if first else ())
    for output in (by_eos, by_stop):
        assert output.token_ids == free.token_ids[: first + 1]
        assert output.finish_reason == "stop"


def test_ignore_eos_goes_on(qwen: PreTrainedModel) -> None:
    free = generate(qwen, SamplingParams(max_tokens=20))
    ignoring = generate(qwen, SamplingParams(max_tokens=20, ignore_eos=True), eos=(free.token_ids[3],))
    assert ignoring == free


def test_an_end_token_at_the_limit_counts_as_stop(qwen: PreTrainedModel) -> None:
    free = generate(qwen, SamplingParams(max_tokens=4))
    assert generate(qwen, SamplingParams(max_tokens=4), eos=(free.token_ids[3],)).finish_reason == "stop"


def test_rows_with_different_stop_tokens_share_a_batch(qwen: PreTrainedModel) -> None:
    engine = NativeEngine(qwen, eos_token_ids=[])
    free = engine.generate(batch(4, tokens=15))
    work = []
    for i, output in enumerate(free):
        params = SamplingParams(max_tokens=15, stop_token_ids=tuple(output.token_ids[i + 2 : i + 3 + i]))
        work.append(Request(str(i), [*PROMPT, i], params, (i,)))
    for request, whole, output in zip(work, free, engine.generate(work), strict=True):
        first = min(whole.token_ids.index(token) for token in request.params.stop_token_ids)
        assert output.token_ids == whole.token_ids[: first + 1]


def test_the_context_length_limits_the_response(qwen: PreTrainedModel) -> None:
    short = random_model("qwen2")
    short.config.max_position_embeddings = 9
    engine = NativeEngine(short, eos_token_ids=[])
    output = engine.generate([Request("a", PROMPT, SamplingParams(max_tokens=50), (3,))])[0]
    assert output.token_ids == generate(qwen, SamplingParams(max_tokens=4)).token_ids
    assert output.finish_reason == "length"
    with pytest.raises(UserError, match="a prompt of 9 tokens"):
        engine.generate([Request("a", [3] * 9, SamplingParams(), (3,))])


def test_the_models_own_positions_are_the_default_limit() -> None:
    engine = NativeEngine(random_model("gpt2"), eos_token_ids=[])
    output = engine.generate([Request("a", [3] * 120, SamplingParams(max_tokens=50), (3,))])[0]
    assert len(output.token_ids) == 8


def test_long_generations_grow_their_memory(qwen: PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=120)
    work = [Request(str(i), [7], params, (i,)) for i in range(3)] + [Request("x", PROMPT, params, (3,))]
    long = NativeEngine(random_model("qwen2"), eos_token_ids=[]).generate(work)
    assert len(long[3].token_ids) == 120
    ids = torch.tensor([PROMPT + long[3].token_ids])
    with torch.no_grad():
        expected = qwen(ids).logits.log_softmax(-1)[0, 4:-1].gather(1, ids[0, 5:, None])[:, 0]
    assert long[3].log_probs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"max_num_seqs": 3}])
def test_bounds_on_memory_change_nothing_but_the_company(qwen: PreTrainedModel, limits: dict[str, int]) -> None:
    bounded, fed = watched(NativeEngine(qwen, eos_token_ids=[], **limits), batch(7))
    free = NativeEngine(qwen, eos_token_ids=[]).generate(batch(7))
    assert [output.token_ids for output in bounded] == [output.token_ids for output in free]
    assert max(rows for rows, count in fed if count == 1) == limits["max_num_seqs"]


def watched(engine: NativeEngine, work: list[Request]) -> tuple[list[Output], list[tuple[int, int]]]:
    """What the engine generates, and the shapes of the token ids that its model reads meanwhile."""
    fed: list[tuple[int, int]] = []
    engine.generate(batch(1))  # the first time it tries out how its model can be driven
    with pytest.MonkeyPatch.context() as patch:
        embed = engine._hf.get_input_embeddings()
        patch.setattr(embed, "forward", lambda ids, f=embed.forward: fed.append(tuple(ids.shape)) or f(ids))
        return engine.generate(work), fed


def test_each_prompt_is_prefilled_once(qwen: PreTrainedModel) -> None:
    prompt = list(range(3, 53))
    work = [Request(str(i), prompt, SamplingParams(max_tokens=4), (i,)) for i in range(6)]
    _, fed = watched(NativeEngine(qwen, eos_token_ids=[]), work)
    assert fed == [(1, 49)] + [(6, 1)] * 4


def test_finished_sequences_leave_the_batch(qwen: PreTrainedModel) -> None:
    work = [Request(str(i), [5], SamplingParams(max_tokens=2 * i), (i,)) for i in (1, 2, 4)]
    _, fed = watched(NativeEngine(qwen, eos_token_ids=[]), work)
    assert [rows for rows, _ in fed] == [3, 3, 2, 2, 1, 1, 1, 1]


def test_on_finish_comes_at_once_and_progress_counts(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[str] = []
    progress: list[dict[str, Any]] = []
    engine = NativeEngine(qwen, eos_token_ids=[])
    names = [("late", 9), ("soon", 2)]
    work = [
        Request(name, [5], SamplingParams(max_tokens=n), (n,), lambda output: finished.append(output.request_id))
        for name, n in names
    ]
    monkeypatch.setattr(Phase, "report", lambda self, **changes: progress.append(changes))
    with phase("rollout"):
        outputs = engine.generate(work)
    assert finished == ["soon", "late"]
    assert [output.request_id for output in outputs] == ["late", "soon"]
    ends = [(changes["done"], changes["total"]) for changes in progress if changes.get("done")]
    assert list(dict.fromkeys(ends))[:2] == [(1, 2), (2, 2)]


def test_listeners_may_make_tensors_that_need_gradients(qwen: PreTrainedModel) -> None:
    kept: list[torch.Tensor] = []
    engine = NativeEngine(qwen, eos_token_ids=[])
    engine.generate([replace(one, on_finish=lambda o: kept.append(torch.tensor(o.log_probs))) for one in batch(2)])
    (kept[0].requires_grad_() * 2).sum().backward()
    assert kept[0].grad is not None


def test_no_requests_need_no_model_call(qwen: PreTrainedModel) -> None:
    assert NativeEngine(qwen, eos_token_ids=[]).generate([]) == []


def test_weights_are_shared_not_copied() -> None:
    model = random_model("qwen2")
    engine = NativeEngine(model, eos_token_ids=[])
    before = engine.generate(batch(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = engine.generate(batch(2))
    assert after == NativeEngine(model, eos_token_ids=[]).generate(batch(2))
    assert after != before


def test_packed_weights_give_the_same_samples(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = NativeEngine(qwen, eos_token_ids=[]).generate(batch(4))
    monkeypatch.setattr(decoder, "_can_pack", lambda weight: False)
    plain = NativeEngine(qwen, eos_token_ids=[]).generate(batch(4))
    for one, two in zip(packed, plain, strict=True):
        assert one.token_ids == two.token_ids
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-5)


def test_the_model_is_left_as_it_was_found() -> None:
    model = random_model("llama")
    model.train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    forwards = [module.forward.__func__ for module in model.modules()]
    random_state = torch.get_rng_state()
    attention = model.config._attn_implementation
    engine = NativeEngine(model, eos_token_ids=[])
    engine.generate(batch(2))
    with pytest.raises(ZeroDivisionError):
        engine.generate([replace(request, on_finish=lambda _output: 1 // 0) for request in batch(2)])
    assert [module.training for module in model.modules()] == training
    assert [module.forward.__func__ for module in model.modules()] == forwards
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), random_state)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_parameters_are_gathered_around_all_model_calls() -> None:
    model = random_model("qwen2")
    inside: list[bool] = []
    state = {"gathered": False, "entered": 0}

    @contextmanager
    def unsharded() -> Iterator[None]:
        assert not torch.is_inference_mode_enabled()
        state.update(gathered=True, entered=state["entered"] + 1)
        yield
        state["gathered"] = False

    model.get_input_embeddings().register_forward_pre_hook(lambda *_: inside.append(state["gathered"]))
    NativeEngine(model, eos_token_ids=[], unsharded=unsharded).generate(batch(3))
    assert inside and all(inside)
    assert state == {"gathered": False, "entered": 1}

    class Nothing(Elsewhere):
        def poll(self, *, wait: bool) -> None:
            inside.append(state["gathered"])  # ranks that have requests already wait for this one's part

    inside.clear()
    NativeEngine(model, eos_token_ids=[], unsharded=unsharded).serve(Nothing())
    assert inside == [True] and state == {"gathered": False, "entered": 2}


def test_weights_cannot_be_pushed(qwen: PreTrainedModel) -> None:
    engine = NativeEngine(qwen, eos_token_ids=[])
    engine.sync_weights(version=3)
    assert engine.weights_version == 3
    with pytest.raises(ValueError, match="shares"):
        engine.sync_weights([("w", torch.zeros(1))], version=4)


def test_diverged_weights_are_reported() -> None:
    model = random_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=3)
        with pytest.raises(RuntimeError, match="not finite"):
            NativeEngine(model, eos_token_ids=[]).generate([Request("a", PROMPT, params)])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        Request("a", [])


def test_a_text_that_ends_a_sequence_may_lie_across_tokens_and_come_with_the_last_one(qwen: PreTrainedModel) -> None:
    work = batch(12, tokens=20)
    engine = NativeEngine(qwen, eos_token_ids=[2])
    for length in (1, 3):
        stop, stopping = stopping_after(work, engine.generate(work), length)
        assert_stopped(engine.generate(stopping), engine.generate(work), stop)
