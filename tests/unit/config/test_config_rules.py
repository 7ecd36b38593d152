"""The rules on keys: settings without effect."""

from fnmatch import fnmatchcase

import pytest

from valor.config import (
    CriticPretrainConfig,
    CriticScoreConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    inert_settings,
    load,
)
from valor.config.inheritance import absolute
from valor.config.loading import conditions
from valor.config.tree import plain_keys, schema

ROOTS = [PPOConfig, CriticPretrainConfig, CriticScoreConfig, SFTConfig, RMConfig]
MASK = ["algorithm.reward_mask_type=bernoulli"]
LENGTHS = ["trainer.total_epochs=2", "trainer.total_training_steps=5"]
SAMPLED = "actor_rollout_ref.rollout.val_kwargs"
GREEDY = ["data.val_files=v", f"{SAMPLED}.do_sample=false"]
RM = ["reward.reward_model.enable=true", "reward.reward_model.model_path=m"]


def named(condition: str, place: str) -> str:
    return absolute(condition.partition("=")[0].removesuffix("!"), place)


def resolves(root, key: str) -> bool:
    """Whether `key` is a key or a property of a section of `root`."""
    parent, _, name = key.rpartition(".")
    section = root if not parent else schema(root)[parent].section if parent in schema(root) else None
    return section is not None and (name in section.model_fields or isinstance(getattr(section, name, None), property))


def test_settings_without_effect_are_listed_with_their_reason():
    argv = ["algorithm.adv_estimator=grpo", "critic.optim.lr=1", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
    loaded = load([*argv, "actor_rollout_ref.rollout.n=4", "trainer.test_freq=5", *MASK])
    assert inert_settings(loaded.config, loaded.explicit_keys) == {
        "actor_rollout_ref.actor.kl_loss_coef": "no effect with actor.use_kl_loss=false",
        "algorithm.reward_mask_type": "no effect with algorithm.reward_mask_ratio=0.0",
        "critic.optim.lr": "no effect: this run has no critic",
        "trainer.test_freq": "no effect: data.val_files is not set",
    }
    actor = "actor_rollout_ref.actor"
    loaded = load([f"{actor}.entropy_coeff=0.1", f"{actor}.calculate_entropy=true", *LENGTHS])
    assert inert_settings(loaded.config, loaded.explicit_keys) == {
        f"{actor}.calculate_entropy": "no effect with actor.entropy_coeff=0.1",
        "trainer.total_epochs": "no effect with trainer.total_training_steps=5",
    }
    loaded = load([f"{actor}.calculate_entropy=true", LENGTHS[0]])
    assert inert_settings(loaded.config, loaded.explicit_keys) == {}
    keys = {"trainer.seed", "trainer.test_freq", "model.lora_alpha", "trainer.total_epochs", "data.val_max_samples"}
    assert inert_settings(SFTConfig(), keys) == {
        "data.val_max_samples": "no effect: data.val_files is not set",
        "model.lora_alpha": "no effect with model.lora_rank=0",
        "trainer.test_freq": "no effect: data.val_files is not set",
    }
    argv = ["data.val_files=v", "data.val_share=0.5", "trainer.total_epochs=2", "trainer.total_training_steps=9"]
    loaded = load(argv, RMConfig)
    assert inert_settings(loaded.config, loaded.explicit_keys) == {
        "data.val_share": "no effect: data.val_files has the validation rows",
        "trainer.total_epochs": "no effect with trainer.total_training_steps=9",
    }


def test_validation_that_samples_reads_its_keys():
    four = [f"{SAMPLED}.{name}" for name in ("n=4", "temperature=1", "top_p=0.7", "top_k=5")]
    for argv in (four, [f"{SAMPLED}.n=1"]):
        loaded = load([*argv, "data.val_files=v"])
        assert inert_settings(loaded.config, loaded.explicit_keys) == {}


def test_a_rule_is_not_about_the_key_that_it_asks():
    argv = ["critic.enable=false", "algorithm.adv_estimator=grpo", "reward.reward_model.enable=false"]
    loaded = load([*argv, "actor_rollout_ref.rollout.server.weight_updates=none"])
    assert inert_settings(loaded.config, loaded.explicit_keys) == {}


@pytest.mark.parametrize(
    ("key", "argv", "reason"),
    [
        ("algorithm.lam=0.9", ["algorithm.reward_source=critic"], "the advantage is V(last) - V"),
        ("retriever.corpus_path=c", ["do_search=true"], "the server at retriever.url is asked"),
        ("critic.freeze_steps=1-3", ["critic.freeze=true", "critic.model.path=c"], "with critic.freeze=true"),
        ("actor_rollout_ref.rollout.free_cache_engine=false", ["trainer.device=cpu"], "with trainer.device=cpu"),
        ("reward.num_workers=2", RM, "the reward model scores every sample (reward_model.rule_weight=0)"),
        ("reward.timeout=2", RM, "the reward model scores every sample (reward_model.rule_weight=0)"),
        ("reward.reward_model.judge.timeout=2", RM, "judge.url is not set"),
        ("algorithm.rollout_correction.loss_type=reinforce", [], "with rollout_correction.bypass_mode=false"),
        ("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1", [], "is in the actor's proc"),
        ("actor_rollout_ref.actor.optim.min_lr_ratio=1", [], "with optim.lr_scheduler_type=constant"),
        ("actor_rollout_ref.actor.loss_scale_factor=9", [], "with actor.loss_agg_mode=token-mean"),
        ("algorithm.lam_actor=0.9", ["algorithm.adaptive_lam_alpha=0.5"], "with algorithm.adaptive_lam_alpha=0.5"),
        (
            f"{SAMPLED}.n=4",
            ["data.val_files=v"],
            "greedy answers to a prompt are all alike: set val_kwargs.temperature",
        ),
        (f"{SAMPLED}.top_p=0.7", GREEDY, "answers are greedy"),
        (f"{SAMPLED}.temperature=1", GREEDY, "with val_kwargs.do_sample=false"),
    ],
)
def test_rules_that_do_not_hold(key, argv, reason):
    loaded = load([key, *argv])
    assert reason in inert_settings(loaded.config, loaded.explicit_keys)[key.partition("=")[0]]


def test_what_other_kinds_of_runs_do_not_read():
    keys = {"algorithm.lam", "data.val_files", "critic.optim.lr", "actor_rollout_ref.rollout.n", "data.train_files"}
    policy = {"algorithm.lam": "no effect: the policy is not trained here, and returns are outcomes (lambda 1)"}
    held_out = {"data.val_files": "no effect: pretrain.holdout keeps prompts back"}
    assert inert_settings(CriticPretrainConfig(), keys) == policy | held_out
    given = CriticPretrainConfig.model_validate({"pretrain": {"rollouts": "r"}})
    assert inert_settings(given, keys).keys() == {"algorithm.lam", "data.val_files", "data.train_files"}
    assert inert_settings(CriticScoreConfig(), keys).keys() == {"algorithm.lam", "critic.optim.lr", "data.train_files"}


@pytest.mark.parametrize("root", ROOTS)
def test_every_condition_and_pattern_is_about_something_in_a_tree(root):
    keys = [key.name for key in plain_keys(root)]
    for key in keys:
        for condition, _, place in conditions(root, key):
            for one in condition.split(" or "):
                asked = named(one, place)
                known = asked == "strategy" or any(resolves(tree, asked) for tree in ROOTS)  # SFT has one engine
                assert known, f"{place}: {condition}"
    for patterns in root().unused().values():
        for pattern in patterns.split():
            assert any(fnmatchcase(key, pattern.removeprefix("!")) for key in keys), pattern


def test_keys_that_act_are_not_listed():
    acting = [
        "data.val_files=v",
        "trainer.test_freq=5",
        "critic.optim.lr=1e-5",
        "actor_rollout_ref.rollout.max_num_seqs=8",
    ]
    loaded = load([*acting, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"])
    assert inert_settings(loaded.config, loaded.explicit_keys) == {}


def test_a_server_that_keeps_its_weights():
    key = "actor_rollout_ref.rollout"
    asked = [f"{key}.name=server", f"{key}.server.base_url=http://h:1/v1", f"{key}.dtype=float32"]
    assert inert_settings(load(asked).config, load(asked).explicit_keys) == {}
    loaded = load([*asked, f"{key}.server.weight_updates=none", f"{key}.server.weights_dir=w"])
    assert inert_settings(loaded.config, loaded.explicit_keys).keys() == {f"{key}.dtype", f"{key}.server.weights_dir"}


def test_number_of_keys_stays_readable():
    assert len(plain_keys(PPOConfig)) <= 367


def test_a_reference_without_weights_of_its_own_has_no_precision():
    argv = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16"]
    loaded = load([*argv, "actor_rollout_ref.model.lora_rank=8"])
    [(key, reason)] = inert_settings(loaded.config, loaded.explicit_keys).items()
    assert key == argv[1].partition("=")[0] and reason.endswith("the actor without its adapters")
    assert inert_settings(load(argv).config, loaded.explicit_keys) == {}
