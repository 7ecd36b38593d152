"""Checkpoints of a group of one: bitwise resume, no pickle, errors."""

import json

import pytest
import torch
from safetensors import safe_open
from tiny_engine import CPU, loss_fn, ragged_batch, tiny_engine, tiny_policy, weights

from valor.config.engine import FSDPConfig, OptimConfig
from valor.engines import checkpoint
from valor.engines.fsdp.engine import FSDPEngine
from valor.errors import UserError

pytestmark = pytest.mark.usefixtures("alone")

BATCH = ragged_batch()
SCHEDULE = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2}


def train(engine, steps: int) -> list[dict]:
    log = []
    for _ in range(steps):
        metrics = engine.forward_backward(BATCH, loss_fn(27.0), max_tokens=20)
        log.append({**metrics, **engine.optimizer_step()})
    return log


def test_resume_is_bitwise(tmp_path):
    straight = tiny_engine(**SCHEDULE)
    train(straight, 3)
    straight.save(tmp_path)
    expected = train(straight, 3)
    resumed = tiny_engine(seed=5, **SCHEDULE)
    train(resumed, 1)  # state that loading must replace
    resumed.load(tmp_path)
    assert train(resumed, 3) == expected
    assert resumed.counters == straight.counters == checkpoint.Counters(updates=6, schedule_steps=6)
    for name, value in weights(resumed).items():
        assert torch.equal(value, weights(straight)[name])


@pytest.mark.parametrize(("before", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_weights_and_moments_that_were_kept_in_another_precision(before, now, tmp_path):
    def engine(dtype: str, seed: int):
        policy = tiny_policy(seed).to(getattr(torch, dtype))
        return FSDPEngine(policy, fsdp=FSDPConfig(dtype=now), optim=OptimConfig(lr=1e-2), device=CPU, total_steps=10)

    first, second = engine(before, 0), engine(now, 5)
    train(first, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    for (name, old), new in zip(first.module.named_parameters(), second.module.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            moments = first.optimizer.state[old][key], second.optimizer.state[new][key]
            torch.testing.assert_close(
                *(x.full_tensor().float() for x in moments), rtol=0.01, atol=0, msg=f"{name} {key}"
            )
        torch.testing.assert_close(new.full_tensor().float(), old.full_tensor().float(), rtol=0.01, atol=0)
    assert train(second, 1)[0]["skipped"] == 0


def test_saving_does_not_disturb_training(tmp_path):
    saved, untouched = tiny_engine(), tiny_engine()
    log = []
    for i in range(3):
        log += train(saved, 1)
        saved.save(tmp_path / str(i))
    assert log == train(untouched, 3)


def test_files_are_tensors_and_json_alone(tmp_path):
    engine = tiny_engine()
    train(engine, 1)
    engine.save(tmp_path)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    described = [f"huggingface/{name}.json" for name in ("config", "generation_config")]
    assert names == ["engine.json", *described, "shard-00000.safetensors"]
    with safe_open(tmp_path / names[-1], framework="pt") as file:
        stored = set(file.keys())
    parameters = {n for n, _ in engine.module.named_parameters()}
    expected = {f"model.{n}" for n in parameters}
    expected |= {f"optimizer.{n}.{key}" for n in parameters for key in ("exp_avg", "exp_avg_sq")}
    assert stored == expected
    state = json.loads((tmp_path / "engine.json").read_text())
    assert state["counters"] == {"updates": 1, "skipped": 0, "schedule_steps": 1}


def test_a_second_save_replaces_the_first(tmp_path):
    engine = tiny_engine()
    engine.save(tmp_path)
    (tmp_path / "shard-00001.safetensors").write_bytes((tmp_path / "shard-00000.safetensors").read_bytes())
    train(engine, 1)
    engine.save(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("*.*")) == ["engine.json", "shard-00000.safetensors"]


def test_an_engine_saved_before_its_first_step(tmp_path):
    fresh = tiny_engine()
    fresh.save(tmp_path)
    other = tiny_engine(seed=5)
    other.load(tmp_path)
    assert train(other, 2) == train(fresh, 2)


def test_a_frozen_engine_saves_weights_and_reads_any_checkpoint(tmp_path):
    frozen = tiny_engine(frozen=True)
    frozen.save(tmp_path / "frozen")
    with safe_open(next((tmp_path / "frozen").glob("*.safetensors")), framework="pt") as file:
        assert all(key.startswith("model.") for key in file.keys())  # noqa: SIM118
    trained = tiny_engine(seed=3)
    train(trained, 1)
    trained.save(tmp_path / "trained")
    frozen.load(tmp_path / "trained")
    assert torch.equal(frozen.forward(BATCH)["log_probs"], trained.forward(BATCH)["log_probs"])
    with pytest.raises(UserError, match="AdamW"):
        trained.load(tmp_path / "frozen")


def test_plain_modules_read_checkpoints_without_sharding(tmp_path):
    engine = tiny_engine()
    train(engine, 1)
    engine.save(tmp_path)
    policy = tiny_policy(seed=4)
    checkpoint.load(tmp_path, policy, None)
    for name, value in weights(engine).items():
        assert torch.equal(dict(policy.named_parameters())[name].data, value)
    assert policy.hf.lm_head.weight is policy.hf.model.embed_tokens.weight


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(UserError, match="no engine checkpoint"):
        tiny_engine().load(tmp_path)


def test_checkpoint_of_another_model(tmp_path):
    tiny_engine(frozen=True).save(tmp_path)
    with pytest.raises(UserError, match="shape"):
        checkpoint.load(tmp_path, tiny_policy(hidden_size=16), None)
    with pytest.raises(UserError, match="lacks model"):
        checkpoint.load(tmp_path, tiny_policy(num_hidden_layers=3), None)


def test_checkpoint_of_a_later_format(tmp_path):
    tiny_engine(frozen=True).save(tmp_path)
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        tiny_engine().load(tmp_path)


def test_export_from_the_engine(tmp_path):
    engine = tiny_engine()
    train(engine, 1)
    engine.export(tmp_path)
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = BATCH["prompts"][:1]
    with engine.unsharded() as module, torch.no_grad():
        torch.testing.assert_close(hf(input_ids=ids).logits, module.hf(input_ids=ids).logits, rtol=0, atol=1e-5)
