"""Settings without effect, and things that this version cannot do."""

import pytest

from valor.config import PPOConfig, SFTConfig, inert_settings, load, unavailable_settings
from valor.config.inert import TABLE as INERT
from valor.config.names import all_keys
from valor.config.tree import walk_keys
from valor.config.unavailable import TABLE as UNAVAILABLE
from valor.errors import UserError


def test_settings_without_effect_are_listed_with_their_reason():
    argv = ["actor_rollout_ref.rollout.gpu_memory_utilization=0.4", "algorithm.adv_estimator=grpo", "critic.optim.lr=1"]
    loaded = load([*argv, "actor_rollout_ref.rollout.n=4", "trainer.test_freq=5"])
    inert = inert_settings(loaded.config, loaded.explicit_keys)
    assert inert == [
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "no effect with rollout.name=native"),
        ("critic.optim.lr", "no effect: this run has no critic"),
        ("trainer.test_freq", "no effect: data.val_files is not set"),
    ]
    assert inert_settings(SFTConfig(), {"trainer.seed"}) == []


def test_keys_that_act_are_not_listed():
    acting = [
        "data.val_files=v",
        "trainer.test_freq=5",
        "critic.optim.lr=1e-5",
        "actor_rollout_ref.rollout.max_num_seqs=8",
    ]
    loaded = load([*acting, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"])
    assert inert_settings(loaded.config, loaded.explicit_keys) == []


def test_a_server_has_options_of_its_own():
    key = "actor_rollout_ref.rollout"
    asked = [f"{key}.name=server", f"{key}.server.base_url=http://h:1/v1"]
    more = [f"{key}.max_num_seqs=8", f"{key}.dtype=float32", f"{key}.enforce_eager=true", f"{key}.max_model_len=9000"]
    loaded = load([*asked, *more])
    inert = inert_settings(loaded.config, loaded.explicit_keys)
    assert [found for found, _ in inert] == [f"{key}.enforce_eager", f"{key}.max_model_len"]
    assert all(reason == "no effect with rollout.name=server: the server has options of its own" for _, reason in inert)
    loaded = load([*asked, *more[:2], f"{key}.server.weight_updates=none", f"{key}.server.weights_dir=w"])
    inert = inert_settings(loaded.config, loaded.explicit_keys)
    assert [found for found, _ in inert] == [f"{key}.dtype", f"{key}.server.weights_dir"]
    loaded = load(asked[1:])
    assert inert_settings(loaded.config, loaded.explicit_keys) == [
        (f"{key}.server.base_url", "no effect: rollout.name is not server")
    ]


def test_a_default_run_asks_for_nothing_unavailable():
    assert unavailable_settings(PPOConfig()) == [] and unavailable_settings(SFTConfig()) == []


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.do_sample=false",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "critic.checkpoint.load_contents=[model,optimizer]",
        "critic.checkpoint.async_save=true",
        "reward.reward_manager.name=gdpo",
        "data.custom_cls.path=x.py",
    ],
)
def test_unavailable_features_are_one_line(override):
    dry = load([override, "--dry-run"])
    [line] = dry.unavailable
    assert " is not available in this version: " in line and override.partition("=")[0] in line


def test_what_a_dry_run_shows_a_run_raises():
    argv = ["actor_rollout_ref.rollout.name=sglang", "critic.checkpoint.async_save=true"]
    with pytest.raises(UserError) as caught:
        load(argv)
    assert str(caught.value).splitlines() == list(load([*argv, "--dry-run"]).unavailable)


def test_one_line_per_feature_not_per_key():
    argv = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
    loaded = load([*argv, "actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4", "--dry-run"])
    [line] = loaded.unavailable
    assert line == (
        "The Megatron backend is not available in this version: use strategy=fsdp2 and no megatron_config "
        "(actor_rollout_ref.actor.strategy='megatron', "
        'actor_rollout_ref.actor.megatron_config={"tensor_model_parallel_size": 4})'
    )


def test_every_pattern_of_the_tables_matches_a_key():
    from fnmatch import fnmatchcase

    engine_kwargs = [f"actor_rollout_ref.rollout.engine_kwargs.{engine}.x" for engine in ("vllm", "sglang")]
    keys = [*all_keys(PPOConfig), *all_keys(SFTConfig), *engine_kwargs]
    patterns = [entry.pattern for entry in UNAVAILABLE] + [p for entry in INERT for p in entry.patterns]
    assert [p for p in patterns if not any(fnmatchcase(key, p) for key in keys)] == []


def test_number_of_keys_stays_readable():
    assert len(list(walk_keys(PPOConfig))) < 360


def test_estimators_without_lambda_are_those_that_take_none():
    from valor.algorithms import ADVANTAGES, advantage_options
    from valor.config.inert import CRITIC_FREE

    without = {n for n in ADVANTAGES.names() if ADVANTAGES[n].builtin and "lam_actor" not in advantage_options(n)}
    assert without == CRITIC_FREE


def test_a_reference_without_weights_of_its_own_has_no_precision():
    argv = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.dtype=float32"]
    loaded = load([*argv, "actor_rollout_ref.model.lora_rank=8"])
    [(key, reason)] = inert_settings(loaded.config, loaded.explicit_keys)
    assert key == argv[1].partition("=")[0] and reason.endswith("the actor without its adapters")
    assert inert_settings(load(argv).config, loaded.explicit_keys) == []
