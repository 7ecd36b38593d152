"""Memory that does not suffice for a micro-batch: smaller ones, the same gradient, and a word about it."""

import pytest
import torch
from tiny_engine import gradients, loss_fn, ragged_batch, tiny_engine

from valor.errors import TrainingStopped

pytestmark = pytest.mark.usefixtures("alone")

TOKENS = 27.0
BATCH = ragged_batch()
LONGEST = 11  # prompt and response
ALL = 7 * LONGEST  # padded tokens of the whole batch


class SmallDevice:
    """Raises where a pass through the last layer has more than `room` positions, as a full GPU would.

    The first `spared` passes are not looked at.
    """

    text = "CUDA out of memory (injected)"

    def __init__(self, engine, room: int, *, backward: bool = False, spared: int = 0) -> None:
        self.room, self.spared, self.seen = room, spared, []
        layer = engine.module.hf.model.layers[-1].mlp
        if backward:
            layer.register_full_backward_hook(lambda module, grad_in, grad_out: self.check(grad_out[0]))
        else:
            layer.register_forward_hook(lambda module, args, out: self.check(out))

    def check(self, x: torch.Tensor) -> None:
        self.seen.append(x.shape[0] * x.shape[1])
        if self.seen[-1] > self.room and len(self.seen) > self.spared:
            raise torch.OutOfMemoryError(self.text)


def assert_same_gradients(engine, expected) -> None:
    found = gradients(engine)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def expected(alone) -> dict[str, torch.Tensor]:
    engine = tiny_engine()
    engine.forward_backward(BATCH, loss_fn(TOKENS))
    return gradients(engine)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 3 * LONGEST])
def test_the_gradient_is_that_of_a_large_device(expected, backward, max_tokens):
    engine = tiny_engine()
    device = SmallDevice(engine, room=2 * LONGEST, backward=backward)
    metrics = engine.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=max_tokens)
    assert_same_gradients(engine, expected)
    assert metrics["oom_retries"] == (1 if max_tokens else 2)
    assert metrics["token_budget_min"] == 16  # half of three rows
    assert metrics["tokens"] == TOKENS  # what was done twice counts once
    assert max(device.seen) > device.room


def test_a_backward_that_fails_in_a_later_micro_batch_leaves_earlier_calls_alone(expected):
    engine = tiny_engine()
    engine.forward_backward(BATCH.take([0, 1, 2]), loss_fn(TOKENS))
    device = SmallDevice(engine, room=11, backward=True, spared=1)
    metrics = engine.forward_backward(BATCH.take([3, 4, 5, 6]), loss_fn(TOKENS), max_rows=2)
    assert device.seen[:2] == [20, 12]
    assert metrics["oom_retries"] == 1
    assert_same_gradients(engine, expected)


def test_the_smaller_budget_stays_and_is_told_once():
    engine = tiny_engine()
    device = SmallDevice(engine, room=3 * LONGEST)
    assert engine.forward_backward(BATCH, loss_fn(TOKENS))["oom_retries"] == 1
    device.seen.clear()
    assert "oom_retries" not in engine.forward_backward(BATCH, loss_fn(TOKENS))
    assert max(device.seen) <= device.room


def test_forward_passes_have_a_budget_of_their_own():
    engine = tiny_engine()
    expected = engine.forward(BATCH)["log_probs"]
    device = SmallDevice(engine, room=2 * LONGEST)
    torch.testing.assert_close(engine.forward(BATCH)["log_probs"], expected, rtol=0, atol=1e-5)
    device.room = ALL
    device.seen.clear()
    metrics = engine.forward_backward(BATCH, loss_fn(TOKENS))
    assert device.seen == [7 * (LONGEST - 1)]  # one piece: the last token of a row is no input
    assert metrics["oom_retries"] == 2  # those of the forward pass


def test_training_goes_on_as_on_a_large_device():
    small, large = tiny_engine(), tiny_engine()
    SmallDevice(small, room=2 * LONGEST, backward=True)
    for _ in range(3):
        small.forward_backward(BATCH, loss_fn(TOKENS))
        large.forward_backward(BATCH, loss_fn(TOKENS))
        assert small.optimizer_step()["grad_norm"] == pytest.approx(large.optimizer_step()["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("backward", [False, True])
def test_one_row_that_does_not_fit_ends_the_run_with_what_to_do(backward):
    engine = tiny_engine()
    SmallDevice(engine, room=3, backward=backward)
    with pytest.raises(TrainingStopped, match=r"one sample of 11 tokens.*lower data\.max_response_length"):
        engine.forward_backward(BATCH, loss_fn(TOKENS))


@pytest.mark.parametrize("pass_", ["forward", "forward_backward"])
def test_several_processes_stop_with_a_line(engine_of_two, pass_):
    SmallDevice(engine_of_two, room=2 * LONGEST)
    with pytest.raises(TrainingStopped, match=r"one of 2 processes.*ppo_max_token_len_per_gpu"):
        engine_of_two.forward(BATCH) if pass_ == "forward" else engine_of_two.forward_backward(BATCH, loss_fn(TOKENS))


@pytest.fixture
def engine_of_two(alone, monkeypatch):
    """It is one process, which is told that it is one of two; no row has reached a gather when memory runs out."""
    engine = tiny_engine()
    monkeypatch.setattr("valor.engines.fsdp.engine.dist.get_world_size", lambda: 2)
    monkeypatch.setattr("valor.engines.microbatch.max_over_ranks", lambda value: value)
    return engine


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'"])
def test_errors_of_cublas_and_nccl_are_recovered_like_torchs_own(expected, monkeypatch, text):
    engine = tiny_engine()
    monkeypatch.setattr(torch, "OutOfMemoryError", RuntimeError)
    device = SmallDevice(engine, room=2 * LONGEST)
    device.text = text
    assert engine.forward_backward(BATCH, loss_fn(TOKENS))["oom_retries"] > 0
    assert_same_gradients(engine, expected)


def test_an_optimizer_without_room_for_its_state_says_what_to_do(monkeypatch):
    engine = tiny_engine()
    engine.forward_backward(BATCH, loss_fn(TOKENS))

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    monkeypatch.setattr(engine.optimizer, "step", full)
    with pytest.raises(TrainingStopped, match=r"optimizer's step.*trainer\.n_gpus_per_node"):
        engine.optimizer_step()
