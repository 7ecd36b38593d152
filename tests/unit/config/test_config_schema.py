"""The tree itself: frozen, closed, documented, typed."""

import pickle
import subprocess
import sys

import pytest
from pydantic import ValidationError

from valor.config import ActorConfig, CriticConfig, DataConfig, FSDPConfig, PPOConfig, RolloutConfig, SFTConfig
from valor.config.tree import exists, flatten, is_open, is_section, nested, plain_keys


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_every_key_and_section_has_a_doc_string(root):
    undocumented = [key.name for key in plain_keys(root) if not key.info.description]
    assert undocumented == []


def test_sections_are_frozen_and_closed():
    config = PPOConfig()
    with pytest.raises(ValidationError):
        config.trainer.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="extra"):
        DataConfig.model_validate({"batch": 3})


def test_sections_travel_to_other_processes():
    config = PPOConfig.model_validate({"algorithm": {"adv_estimator": "grpo"}, "data": {"seed": 3}})
    assert pickle.loads(pickle.dumps(config)) == config


def test_importing_the_config_does_not_import_torch():
    code = "import sys, valor.config; valor.config.load([]); print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (ActorConfig, {"ppo_mini_batch_size": 0}),
        (ActorConfig, {"loss_agg_mode": "token_mean"}),
        (ActorConfig, {"clip_ratio": float("nan")}),
        (ActorConfig, {"use_kl_loss": "maybe"}),
        (RolloutConfig, {"n": True}),
        (RolloutConfig, {"temperature": 0}),
        (RolloutConfig, {"top_p": 0}),
        (DataConfig, {"train_files": {"a": 1}}),
        (DataConfig, {"truncation": "cut"}),
        (FSDPConfig, {"dtype": "float16"}),
        (CriticConfig, {"cliprange_value": -0.5}),
    ],
)
def test_values_outside_a_keys_type_are_refused(section, values):
    with pytest.raises(ValidationError):
        section.model_validate(values)


def test_spellings_that_are_taken_for_granted():
    data = DataConfig(train_files="~/a.parquet", val_files=["b.parquet"])  # type: ignore[arg-type]
    assert not data.train_files[0].startswith("~") and data.train_files[0].endswith("/a.parquet")
    assert data.val_files == ["b.parquet"]
    assert FSDPConfig.model_validate({"dtype": "fp32", "model_dtype": "bf16"}).dtype == "float32"
    assert PPOConfig.model_validate({"trainer": {"logger": "console"}}).trainer.logger == ["console"]
    assert PPOConfig.model_validate({"trainer": {"experiment_name": 7}}).trainer.experiment_name == "7"


@pytest.mark.parametrize(
    ("rows", "dynamic", "expected"), [(None, False, None), (4, False, 4), (4, True, None), (None, True, None)]
)
def test_dynamic_batches_lift_the_bound_on_rows(rows, dynamic, expected):
    assert ActorConfig(ppo_micro_batch_size_per_gpu=rows, use_dynamic_bsz=dynamic).max_rows == expected
    assert CriticConfig(ppo_micro_batch_size_per_gpu=rows, use_dynamic_bsz=dynamic).max_rows == expected
    rollout = RolloutConfig(log_prob_micro_batch_size_per_gpu=rows, log_prob_use_dynamic_bsz=dynamic)
    assert rollout.max_rows == expected


@pytest.mark.parametrize(
    ("temperature", "do_sample", "effective"), [(0.0, None, 0.0), (0.6, None, 0.6), (0.6, False, 0.0), (0.6, True, 0.6)]
)
def test_validation_temperature(temperature, do_sample, effective):
    rollout = RolloutConfig.model_validate({"val_kwargs": {"temperature": temperature, "do_sample": do_sample}})
    assert rollout.val_kwargs.effective_temperature == effective


def test_reference_is_needed_by_either_kl_term():
    assert not PPOConfig().needs_reference
    assert PPOConfig.model_validate({"algorithm": {"use_kl_in_reward": True}}).needs_reference
    assert PPOConfig.model_validate({"actor_rollout_ref": {"actor": {"use_kl_loss": True}}}).needs_reference
    exact = {"use_kl_loss": True, "kl_loss_type": "full"}
    config = PPOConfig.model_validate({"actor_rollout_ref": {"actor": exact}, "algorithm": {"kl_penalty": "k1"}})
    assert config.needs_reference and not config.needs_ref_log_probs
    config = PPOConfig.model_validate({"actor_rollout_ref": {"actor": exact}, "algorithm": {"use_kl_in_reward": True}})
    assert config.needs_ref_log_probs


def test_tree_walks():
    assert is_section(PPOConfig, "critic.optim") and not is_section(PPOConfig, "critic.optim.lr")
    assert exists(PPOConfig, "critic.optim.lr") and not exists(PPOConfig, "critic.optim.lrr")
    assert is_open(PPOConfig, "actor_rollout_ref.rollout.engine_kwargs.vllm.seed")
    assert is_open(PPOConfig, "ray_kwargs.ray_init.runtime_env.pip")
    assert not is_open(PPOConfig, "trainer.logger.console") and not is_open(PPOConfig, "nothing.at.all")
    flat = {"a.b": 1, "a.c.d": [2], "e": {}}
    assert flatten(nested(flat)) == flat
