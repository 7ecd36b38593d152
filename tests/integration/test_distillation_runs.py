"""Students that learn from teachers: every form of the signal, two teachers, a pool of their own, a resumed run."""

from pathlib import Path

import pytest
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from runs import assert_same_run, read_metrics
from transformers import AutoModelForCausalLM

from valor.trainer.main_ppo import main

LOSS = "distillation.distillation_loss"
ALONE = ("algorithm.adv_estimator=grpo", f"{LOSS}.use_task_rewards=false", "actor_rollout_ref.actor.optim.lr=3e-3")
SIGNAL = f"{LOSS}.use_policy_gradient=true"


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory) -> Path:
    """The student's model with other weights, and its tokenizer."""
    path = tmp_path_factory.mktemp("teacher")
    for file in tiny["model"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(path)
    return path


def taught(teacher: Path, *more: str) -> list[str]:
    return ["distillation.enabled=true", f"distillation.teacher_models.teacher_model.model_path={teacher}", *more]


FORMS = {
    "k3": (),
    "k1 as advantage": (f"{LOSS}.loss_mode=k1", SIGNAL),
    "forward_kl": (f"{LOSS}.loss_mode=forward_kl",),
    "reverse_kl": (f"{LOSS}.loss_mode=reverse_kl",),
    "jsd": (f"{LOSS}.loss_mode=jsd", f"{LOSS}.beta=0.3"),
    "topk": (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=4"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_student_comes_nearer_in_every_form(form, teacher, overrides, tmp_path):
    more = (*ALONE, "trainer.total_training_steps=12", "trainer.test_freq=-1", "trainer.val_before_train=false")
    assert main(overrides(tmp_path, *taught(teacher, *FORMS[form], *more))) == 0
    steps = read_metrics(tmp_path)
    name = "distillation/reverse_kl" if "distillation/reverse_kl" in steps[0] else "actor/distillation/loss"
    assert sum(step[name] for step in steps[-3:]) < 0.8 * sum(step[name] for step in steps[:3])
