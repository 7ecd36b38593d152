"""`valor config keys` and docs/configuration.md come from the schema."""

from pathlib import Path

import pytest

from valor.config import PPOConfig, SFTConfig, describe_keys
from valor.config.describe import type_text
from valor.config.presets import PRESETS, default_tree
from valor.config.tree import flatten, plain_keys, schema
from valor.errors import UserError
from valor.user_files import load_file

ROOT = Path(__file__).resolve().parents[3]


def test_every_key_has_a_line():
    lines = describe_keys().splitlines()
    assert [line.split()[0] for line in lines] == [key.name for key in plain_keys(PPOConfig)]


def test_a_line_says_key_type_default_and_meaning():
    lines = {line.split()[0]: " ".join(line.split()) for line in describe_keys("actor_rollout_ref").splitlines()}
    assert lines["actor_rollout_ref.actor.optim.lr"] == (
        "actor_rollout_ref.actor.optim.lr number >= 0 1e-06 Peak learning rate."
    )
    assert lines["actor_rollout_ref.actor.clip_ratio_low"] == (
        "actor_rollout_ref.actor.clip_ratio_low number >= 0 = actor_rollout_ref.actor.clip_ratio Lower clip range."
    )
    types = {line.split()[0]: line.split()[1] for line in describe_keys("trainer").splitlines()}
    assert types["trainer.resume_mode"] == "auto|disable|resume_path"
    assert "= data.max_response_length" in lines["actor_rollout_ref.actor.loss_scale_factor"]


def test_prefixes():
    assert len(describe_keys("critic.optim.lr").splitlines()) == 1
    assert all(line.startswith("critic.optim.") for line in describe_keys("critic.optim").splitlines())
    assert describe_keys("optim", root=SFTConfig).splitlines()
    with pytest.raises(UserError, match=r"unknown key 'critic.optimm': did you mean 'critic.optim'"):
        describe_keys("critic.optimm")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("trainer.total_epochs", "integer > 0"),
        ("algorithm.lam", "number from 0 to 1 or auto"),
        ("actor_rollout_ref.rollout.top_p", "number > 0 and <= 1"),
        ("trainer.val_only", "true/false"),
        ("trainer.resume_mode", "one of auto, disable, resume_path"),
        ("trainer.logger", "text or a list of them"),
        ("data.train_files", "path or a list of them"),
        ("data.val_files", "path or a list of them or null"),
        ("trainer.resume_from_path", "path or null"),
        ("actor_rollout_ref.actor.optim.betas", "list of 2 numbers >= 0 and < 1"),
        ("actor_rollout_ref.model.override_config", "dict"),
        (
            "actor_rollout_ref.actor.checkpoint.save_contents",
            "one of model, optimizer, extra, hf_model or a list of them",
        ),
        ("algorithm.rollout_correction.rollout_rs_threshold", "number or text or null"),
    ],
)
def test_types_in_words(key, text):
    assert type_text(schema(PPOConfig)[key]) == text


def test_presets_set_keys_that_exist():
    for name, (root, flat) in PRESETS.items():
        assert [key for key in flat if key not in schema(root)] == [], name


def test_default_tree_names_sources_as_interpolations():
    flat = flatten(default_tree(PPOConfig))
    assert flat["critic.model.path"] == "${actor_rollout_ref.model.path}"
    assert flat["algorithm.lam_actor"] == "${algorithm.lam}"
    assert flat["trainer.default_local_dir"] == "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    assert flat["critic.enable"] is None and flat["actor_rollout_ref.actor.optim.betas"] == [0.9, 0.999]


def test_the_documentation_file_is_up_to_date():
    made = load_file(str(ROOT / "benchmarks" / "config_docs.py"), "path").render_docs()
    path = ROOT / "docs" / "configuration.md"
    assert path.read_text() == made, "run: python benchmarks/config_docs.py > docs/configuration.md"
