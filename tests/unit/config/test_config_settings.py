"""Settings of a Python call are the overrides that one would type."""

import enum
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

from valor.config import PPOConfig, SFTConfig, load
from valor.config.command_line import overrides
from valor.errors import UserError


def test_names_are_keys_or_the_end_of_one_key():
    given = {
        "train_batch_size": 8,
        "rollout.n": 2,
        "critic__optim__lr": 1e-5,
        "algorithm": {"gamma": 0.5, "filter_groups": {"enable": True}},
        "actor_rollout_ref.model.custom_chat_template": "it's {{ a }}, \\n",
        "val_files": None,
        "default_local_dir": Path("/a/b-c"),
        "project_name": "null",
    }
    assert overrides(PPOConfig, given) == [
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
        "critic.optim.lr=1e-05",
        "algorithm.gamma=0.5",
        "algorithm.filter_groups.enable=true",
        "actor_rollout_ref.model.custom_chat_template='it\\'s {{ a }}, \\n'",
        "data.val_files=null",
        "trainer.default_local_dir=/a/b-c",
        "trainer.project_name='null'",
    ]
    config = load([*overrides(PPOConfig, given), "actor_rollout_ref.actor.ppo_mini_batch_size=8"]).config
    assert config.trainer.project_name == "null" and config.algorithm.filter_groups.enable
    assert config.actor_rollout_ref.model.custom_chat_template == given["actor_rollout_ref.model.custom_chat_template"]


def test_a_name_that_several_keys_end_with_is_refused():
    with pytest.raises(UserError, match=r"^lr: which one is meant\? actor_rollout_ref.actor.optim.lr, critic.optim.lr"):
        overrides(PPOConfig, {"lr": 1e-5})
    assert overrides(SFTConfig, {"lr": 1e-5}) == ["optim.lr=1e-05"]


def test_a_word_of_trls_is_no_part_of_a_section_that_is_off():
    """`beta` is the weight of the KL term there, and here distillation has a key that ends so."""
    for given in ({"beta": 0.04}, {"kl_coef": 0.05}, {"loss_type": "dapo"}):
        assert list(given) == [text.partition("=")[0] for text in overrides(PPOConfig, given)]
        with pytest.raises(UserError, match=r": set actor_rollout_ref\.actor\.|: set algorithm\.use_kl_in_reward=true"):
            load(overrides(PPOConfig, given))
    assert overrides(SFTConfig, {"dtype": "float32"}) == ["fsdp_config.dtype=float32"]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("tools", [len], "tools='list': mark them with @function_tool; set rollout.multi_turn.enable=true"),
        (
            "environment_factory",
            dict,
            "environment_factory='type': set rollout.agent.environment to its file and class",
        ),
        (
            "rollout_func",
            len,
            "rollout_func='builtin_function_or_method': set actor_rollout_ref.rollout.agent.gateway.function",
        ),
    ],
)
def test_functions_and_classes_under_trls_names_are_told_where_they_go(name, value, line):
    with pytest.raises(UserError) as error:
        load(overrides(PPOConfig, {name: value}))
    assert str(error.value).startswith(line)


def test_values_of_numpy_torch_and_enumerations_are_what_they_hold():
    class Kind(enum.Enum):
        COSINE = "cosine"

    given = {
        "train_batch_size": np.int64(8),
        "critic.optim.lr": np.float64(1e-5),
        "gamma": torch.tensor(0.5),
        "logger": np.array(["file"]),
        "critic.optim.lr_scheduler_type": Kind.COSINE,
        "default_local_dir": PurePosixPath("/a"),
    }
    values = ["8", "1e-05", "0.5", "['file']", "cosine", "/a"]
    assert [text.partition("=")[2] for text in overrides(PPOConfig, given)] == values


def test_what_no_key_ends_with_is_for_the_loader_to_tell():
    assert overrides(PPOConfig, {"trian_batch_size": 8}) == ["trian_batch_size=8"]
    with pytest.raises(UserError, match=r"did you mean 'data\.train_batch_size'"):
        load(overrides(PPOConfig, {"trian_batch_size": 8}))


def test_what_no_command_line_could_say():
    with pytest.raises(UserError, match=r"gamma: a setting is a number, a text, a list or a dict, got set$"):
        overrides(PPOConfig, {"gamma": {1}})
    with pytest.raises(UserError, match=r"environment: .*, got function: .* give its name as file\.py:multiply$"):

        def multiply(a): ...

        overrides(PPOConfig, {"environment": multiply})
