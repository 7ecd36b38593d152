"""Teachers beside what else a run can be: generation a step ahead, episodes with observations, weights that follow the
policy, a weight that falls."""

from pathlib import Path

import pytest
import torch
from runs import assert_same_run, assert_same_weights, read_metrics, weights
from safetensors.torch import load_file
from test_distillation_runs import ALONE, LOSS, ONE_UPDATE, SIGNAL, make_teacher, taught
from transformers import AutoConfig, AutoModelForCausalLM
from two_turns import settings

from valor.collector.collector import Collector
from valor.data.batch import Batch
from valor.trainer.main_ppo import main

HF_MODEL = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
AHEAD = [f"trainer.v1.{one}" for one in ("trainer_mode=separate_async", "deterministic=true")]
AHEAD += ["trainer.v1.sampler.max_off_policy_threshold=1", "trainer.controller=local"]


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory) -> Path:
    return make_teacher(tiny["model"], tmp_path_factory.mktemp("teacher") / "a", 5)


@pytest.fixture
def collected(monkeypatch) -> list[Batch]:
    """The batches of the run, in their order."""
    batches, next_batch = [], Collector.next_batch

    def recording(*arguments):
        batch, metrics = next_batch(*arguments)
        batches.append(batch)
        return batch, metrics

    monkeypatch.setattr(Collector, "next_batch", recording)
    return batches


def reverse_kl(batch: Batch, policy: Path, teacher: Path) -> float:
    """Mean of log π − log ν over the policy's tokens, each row alone, by plain transformers."""
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (policy, teacher)]
    gaps, columns = [], (batch[name] for name in ("prompts", "responses", "response_mask"))
    lengths = zip(batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist(), strict=True)
    for prompt, response, mask, (before, after) in zip(*columns, lengths, strict=True):
        ids = torch.cat([prompt[:before], response[:after]])
        with torch.no_grad():
            logits = [model(ids[None]).logits[0, before - 1 : -1].float().log_softmax(-1) for model in models]
        of_policy, of_teacher = (x.gather(1, response[:after, None])[:, 0] for x in logits)
        gaps.append((of_policy - of_teacher)[mask[:after] > 0])
    return float(torch.cat(gaps).mean())


def test_a_step_ahead_the_signal_is_of_the_present_policy(tiny, teacher, overrides, tmp_path, collected):
    """Samples are of older weights, the signal of those that are updated; a resumed run is the same."""
    more = taught(teacher, *SIGNAL, *ALONE, *AHEAD, HF_MODEL, "trainer.save_freq=1", ONE_UPDATE[1])
    assert main(overrides(tmp_path / "run", *more)) == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["off_policy/age/mean"] for row in rows[1:]] == [0, 1, 1, 1]
    saved = [tmp_path / "run" / f"global_step_{step}" / "actor" / "huggingface" for step in range(1, 4)]
    for row, batch, policy in zip(rows[1:], collected, [tiny["model"], *saved], strict=True):
        assert row["actor/distillation/loss"] == pytest.approx(reverse_kl(batch, policy, teacher), rel=1e-4)
    source = f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_2'}"
    assert main(overrides(tmp_path / "resumed", *more, "trainer.resume_mode=resume_path", source)) == 0
    assert read_metrics(tmp_path / "resumed") == rows[-2:]
    assert_same_weights(tmp_path / "run", tmp_path / "resumed")


@pytest.mark.parametrize("packed", ["true", "false"])
def test_observations_are_not_judged(packed, tiny, teacher, overrides, tmp_path, collected):
    loops = settings(tmp_path, forks=True, reward=0.5)
    more = taught(teacher, *SIGNAL, *ALONE, *ONE_UPDATE, f"actor_rollout_ref.model.use_remove_padding={packed}")
    assert main(overrides(tmp_path / "run", *more, *loops, "actor_rollout_ref.model.lora_rank=4")) == 0
    (batch,), step = collected, read_metrics(tmp_path / "run")[1]
    inside = torch.arange(batch["responses"].shape[1]) < batch["response_lengths"][:, None]
    assert (inside & (batch["response_mask"] == 0)).any() and step["episode/rows"] == 1.5
    expected = reverse_kl(batch, tiny["model"], teacher)  # new adapters change nothing
    for key in ("distillation/reverse_kl", "actor/distillation/loss"):
        assert step[key] == pytest.approx(expected, rel=1e-4), key


def test_a_moving_teacher_is_the_average_of_the_policies(tiny, overrides, tmp_path):
    moving = taught(tiny["model"], *SIGNAL, *ALONE, HF_MODEL, "trainer.save_freq=1")
    moving.append("distillation.teacher_models.teacher_model.update_rate=0.25")
    assert main(overrides(tmp_path / "run", *moving)) == 0

    average = policy = load_file(tiny["model"] / "model.safetensors")
    for step in range(1, 5):  # before a step it goes to the policy that the last one has left
        average = {name: weight + 0.25 * (policy[name] - weight) for name, weight in average.items()}
        policy = load_file(tmp_path / "run" / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")
    teacher = weights(tmp_path / "run", "teacher")
    assert all(torch.allclose(teacher[name], weight, atol=1e-6) for name, weight in average.items())
    assert any((teacher[name] - weight).abs().max() > 1e-4 for name, weight in policy.items())
    gaps = [row["distillation/reverse_kl"] for row in read_metrics(tmp_path / "run")[1:]]
    assert abs(gaps[0]) < 1e-5 < abs(gaps[-1])
    source = f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_2'}"
    assert main(overrides(tmp_path / "resumed", *moving, "trainer.resume_mode=resume_path", source)) == 0
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "run")[-2:]
    assert_same_weights(tmp_path / "run", tmp_path / "resumed")


def test_a_falling_weight_is_that_weight_in_its_step(teacher, overrides, tmp_path):
    """Of 0.5 that falls over two steps, the second step is one with 0.25, and the third one of the task alone."""
    task, sizes = ("algorithm.adv_estimator=grpo",), ("trainer.save_freq=1", "trainer.total_training_steps=3")
    falling = (f"{LOSS}.distillation_loss_coef=0.5", f"{LOSS}.distillation_loss_coef_decay_steps=2")
    assert main(overrides(tmp_path / "run", *taught(teacher, *task, *sizes, *falling))) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert [row["distillation/coefficient"] for row in rows] == [0.5, 0.25, 0.0]
    source = tmp_path / "run" / "global_step_1"
    for step, more in ((2, taught(teacher, f"{LOSS}.distillation_loss_coef=0.25")), (3, [])):
        again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}", f"{sizes[1][:-1]}{step}"]
        changed = "trainer.resume_changed=allow"
        assert main(overrides(tmp_path / f"from_{step}", *task, sizes[0], *more, *again, changed)) == 0
        metrics = read_metrics(tmp_path / f"from_{step}")[-1]
        assert metrics["actor/grad_norm"] == pytest.approx(rows[step - 1]["actor/grad_norm"], rel=1e-5)
        source = tmp_path / "run" / f"global_step_{step}"


MISTAKES = {
    "drop distillation.nnodes": ("distillation.nnodes=1",),
    "here adapters are trained": ("actor_rollout_ref.model.lora_rank=4",),
    "set actor_rollout_ref.actor.strategy=fsdp2": ("actor_rollout_ref.actor.strategy=megatron",),
    "would round small moves away": ("actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",),
    "moves weights that this run loads": (
        "distillation.teacher_models.me.update_rate=0.1",
        "distillation.teacher_models.me.prompt_template='{prompt}!'",
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_cannot_follow_the_policy_is_one_line(line, tiny, overrides, tmp_path, capsys):
    moving = "distillation.teacher_models.teacher_model.update_rate=0.25"
    more = taught(tiny["model"], *SIGNAL, *ALONE, moving, *MISTAKES[line])
    assert main(overrides(tmp_path / "run", *more)) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if line in text]
    assert "Traceback" not in said and not (tmp_path / "run").exists()


def test_a_teacher_of_another_size_cannot_follow_the_policy(tiny, overrides, tmp_path, capsys):
    small = make_teacher(tiny["model"], tmp_path / "small", 5)
    config = AutoConfig.from_pretrained(small)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    AutoModelForCausalLM.from_config(config).save_pretrained(small)
    moving = "distillation.teacher_models.teacher_model.update_rate=0.25"
    assert main(overrides(tmp_path / "run", *taught(small, *SIGNAL, *ALONE, moving))) == 2
    assert "has other weights than the policy" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_a_moving_teacher_of_two_ranks_under_ray(tiny, overrides, tmp_path):
    moving = taught(tiny["model"], f"{LOSS}.loss_mode=reverse_kl", "algorithm.adv_estimator=grpo")
    moving += ["distillation.teacher_models.teacher_model.update_rate=0.25", "trainer.total_training_steps=2"]
    assert main(overrides(tmp_path / "local", *moving, "trainer.controller=local")) == 0
    assert main(overrides(tmp_path / "ray", *moving, "trainer.controller=ray")) == 0
    assert_same_run(tmp_path / "local", tmp_path / "ray")
    assert main(overrides(tmp_path / "two", *moving, "trainer.n_gpus_per_node=2")) == 0
    for one, two in zip(read_metrics(tmp_path / "local")[1:], read_metrics(tmp_path / "two")[1:], strict=True):
        assert two["actor/distillation/loss"] == pytest.approx(one["actor/distillation/loss"], rel=1e-3, abs=1e-6)
