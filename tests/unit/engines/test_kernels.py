"""Compiled layers and Liger's: the numbers of the plain ones, or one line at the start."""

import sys
from functools import partial

import pytest
import torch
from tiny_engine import CPU, loss_fn, ragged_batch, tiny_policy

from valor.config.actor import ActorConfig
from valor.config.engine import ModelConfig
from valor.engines import kernels
from valor.engines.fsdp.engine import build_fsdp
from valor.errors import UserError
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel

pytestmark = pytest.mark.usefixtures("alone")

BATCH = ragged_batch()


def build(**options):
    packed, recomputed = options.pop("packed", True), options.pop("recomputed", False)

    def load(dtype):
        hf = tiny_policy(num_hidden_layers=1).hf.to(dtype)
        if recomputed:
            checkpoint_layers(hf)
        return PolicyModel(hf, packed=packed)

    return build_fsdp(ActorConfig(fsdp_config={"dtype": "float32"}), ModelConfig(**options), load, device=CPU)


def gradients(engine) -> dict:
    engine.forward_backward(BATCH, loss_fn(27.0))
    return {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_layers_give_the_plain_numbers(recomputed):
    plain, compiled = build(), build(compile=True, recomputed=recomputed)
    assert compiled.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    torch.testing.assert_close(
        compiled.forward(BATCH)["log_probs"], plain.forward(BATCH)["log_probs"], rtol=1e-5, atol=1e-5
    )
    expected = gradients(plain)
    with torch.profiler.profile() as trace:
        found = gradients(compiled)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert any("CompiledFunction" in event.key for event in trace.key_averages())


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (lambda plain, **_: lambda *args, **options: plain(*args, **options) * 1.5, "gives other numbers"),
        (lambda plain, **_: partial(fail, "no C++ compiler\nand more"), r"does not work here.*\(no C\+\+ compiler\)$"),
    ],
)
def test_compiled_layers_that_are_wrong_or_cannot_be(monkeypatch, compiler, message):
    monkeypatch.setattr(torch, "compile", compiler)
    with pytest.raises(UserError, match=f"^model.compile=true {message}"):
        build(compile=True)


def fail(message, *_args, **_options):
    raise RuntimeError(message)


def test_rows_that_are_padded():
    with pytest.raises(UserError, match=r"model\.compile=true is for packed rows, and Qwen2ForCausalLM reads padded"):
        build(compile=True, packed=False)


def test_liger_without_a_gpu():
    with pytest.raises(UserError, match=r"model\.use_liger=true: Liger's kernels need a GPU"):
        build(use_liger=True)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_null_uses_what_passes_the_trial_and_says_what_does_not(factor, monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", lambda plain, **_: lambda *args, **options: plain(*args, **options) * factor)
    plain = build(compile=False)
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    assert not any("forward" in vars(part) for part in build().module.hf.modules()), "a small model is not compiled"
    monkeypatch.setattr(kernels, "_LEAST_TRIED", 0)
    found = build()
    assert any("forward" in vars(part) for part in found.module.hf.modules()) == (factor == 1)
    assert ("model.compile=false, as true gives other numbers (relative" in caplog.text) == (factor != 1)
    assert "liger" not in caplog.text.lower(), "what is not there is not missed"
    torch.testing.assert_close(gradients(found), gradients(plain), rtol=0, atol=0)


def test_what_liger_leaves_behind_is_undone():
    hf = tiny_policy().hf
    module = sys.modules[type(hf).__module__]
    rotate, restore = module.apply_rotary_pos_emb, kernels._snapshot(hf)
    module.apply_rotary_pos_emb, hf.model.norm.offset, hf.model.norm.forward = print, 1.0, print
    restore()
    assert module.apply_rotary_pos_emb is rotate and not {"offset", "forward"} & vars(hf.model.norm).keys()
