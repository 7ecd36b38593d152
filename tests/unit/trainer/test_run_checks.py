"""What algorithms, engines and places find in a configuration: all at once, a line each, before anything is loaded."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest

from valor.algorithms import ADVANTAGES
from valor.config import PPOConfig, load
from valor.config.tree import nested, plain_keys, schema
from valor.errors import UserError
from valor.lab import arithmetic
from valor.trainer.checks import check, derived, inert_settings, lacks_memory, lost_in_rounding
from valor.trainer.memory_plan import GIB
from valor.trainer.phases.standard import phases_of

ACTOR = "actor_rollout_ref.actor"
SERVER = ["actor_rollout_ref.rollout.name=server", "actor_rollout_ref.rollout.server.base_url=http://h:1/v1"]
SERVER += ["actor_rollout_ref.rollout.top_k=5"]
ROLLOUT = "actor_rollout_ref.rollout"
VTRACE = ["algorithm.adv_estimator=vtrace"]
OVERLONG = ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"]
OVERLONG += ["reward.reward_kwargs.overlong_buffer_cfg.len=16"]
TEACHER_ALONE = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "distillation.enabled=true"]
TEACHER_ALONE += ["distillation.teacher_models={a: {model_path: x}}"]
TEACHER_ALONE += ["distillation.distillation_loss.use_task_rewards=false"]
GDPO = ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=2", "algorithm.gdpo_reward_keys=[a]"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.critic_warmup=3"],
            "trainer.critic_warmup=3 needs a critic",
        ),
        (["critic.freeze=true", "critic.model.path=x", "trainer.critic_warmup=3"], "critic_warmup trains the critic"),
        (["critic.freeze=true"], "critic.model.path is not set"),
        (
            [
                "algorithm.adv_estimator=reinforce_plus_plus",
                "data.sampler.difficulty.enable=true",
                "data.sampler.difficulty.predictor=critic",
            ],
            "predictor=critic needs a critic: set critic.enable=true",
        ),
        (
            ["algorithm.reward_source=critic", "algorithm.adv_estimator=reinforce_plus_plus"],
            "reward_source=critic needs a critic",
        ),
        (["algorithm.reward_source=critic", "algorithm.reward_mask_ratio=0.5"], "missing_reward=critic"),
        (
            [
                "algorithm.reward_mask_ratio=0.5",
                "algorithm.missing_reward=bootstrap",
                "algorithm.adv_estimator=reinforce_plus_plus",
            ],
            "missing_reward=bootstrap needs a critic",
        ),
        (
            [
                "algorithm.reward_mask_ratio=0.5",
                "algorithm.reward_mask_flip_adv_when_masked=true",
                "algorithm.adv_whitening=mini_batch",
            ],
            "acts after whitening",
        ),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                "algorithm.rollout_correction.loss_type=reinforce",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            ],
            "algorithm.rollout_correction.loss_type=reinforce and actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        ),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_penalty=full",
            ],
            "algorithm.kl_penalty=full needs a pass of the actor",
        ),
        (["critic.enable=false"], "algorithm.adv_estimator=gae needs a critic: "),
        (
            ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.truncated_responses=bootstrap"],
            "algorithm.truncated_responses",
        ),
        (
            ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "algorithm.gdpo_reward_keys=[a]"],
            "algorithm.adv_kwargs.reward_keys: grpo has no such option",
        ),
        ([*GDPO, "algorithm.gdpo_reward_weights=[1,2]"], "reward_weights=[1, 2]: give a list with one number for each"),
        ([*GDPO, "algorithm.gdpo_reward_weights=[x]"], "reward_weights=['x']: give a list with one number for each"),
        ([*GDPO, "algorithm.reward_noise=0.1"], "algorithm.reward_source=critic and algorithm.reward_noise do not"),
        (
            [*GDPO, "algorithm.reward_source=critic", "critic.enable=true"],
            "algorithm.reward_source=critic and algorithm.reward_noise do not",
        ),
        ([*GDPO, *OVERLONG], "overlong_reward is one of: add it to algorithm.adv_kwargs.reward_keys"),
        (
            [*GDPO, "reward.reward_model.enable=true", "reward.reward_model.model_path=x"],
            "rm_score is one of: add it to algorithm.adv_kwargs.reward_keys",
        ),
        ([*TEACHER_ALONE, "algorithm.use_kl_in_reward=true"], "set actor_rollout_ref.actor.use_kl_loss=true instead"),
        (["algorithm.reward_source=critic", "algorithm.use_kl_in_reward=true"], "use_kl_loss"),
        (["algorithm.reward_source=critic", "algorithm.truncated_responses=bootstrap"], "rewards by rule"),
        (["algorithm.gae_unit=turn", "algorithm.truncated_responses=bootstrap"], "use gae_unit=token or bilevel"),
        (
            ["algorithm.gae_unit=turn", "algorithm.reward_mask_ratio=0.1", "algorithm.missing_reward=critic"],
            "use gae_unit=token or bilevel",
        ),
        (
            ["algorithm.adv_estimator=remax", "algorithm.reward_source=critic", "critic.enable=true"],
            "compares with the graders' scores of greedy responses",
        ),
        (
            ["critic.kind=probe", "algorithm.gae_unit=bilevel", "algorithm.lam_turn=0.5"],
            "critic.kind=probe learns outcomes",
        ),
        ([*VTRACE, "critic.enable=false"], "algorithm.adv_estimator=vtrace needs a critic: "),
        ([*VTRACE, "algorithm.rollout_correction.bypass_mode=true"], "vtrace needs a pass of the actor"),
        ([*VTRACE, "algorithm.rollout_correction.rollout_is=sequence"], "use rollout_is=token or prefix"),
        ([*VTRACE, "+algorithm.adv_kwargs.rho_bar=0.5"], "rho_bar and c_bar of vtrace must be at least 1, got 0.5"),
        ([*VTRACE, "+algorithm.adv_kwargs.c_bar=high"], "algorithm.adv_kwargs={'c_bar': 'high'}: "),
        (["algorithm.gae_unit=turn", "algorithm.lam=0.95"], "gae_unit=turn has no tokens to discount: set gamma_turn"),
        (["algorithm.gae_unit=bilevel", "algorithm.adaptive_lam_alpha=0.1"], "gae_unit=bilevel takes neither adaptive"),
        (["actor_rollout_ref.rollout.dtype=float32"], "actor_rollout_ref.rollout.dtype=float32, but rollout.name=nat"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=dro"], "policy_loss.loss_mode=dro: dro needs dro_beta > 0"),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=dro", "actor_rollout_ref.actor.policy_loss.dro_beta=a"],
            "policy_loss.loss_mode=dro: ",
        ),
        (["actor_rollout_ref.actor.tau_pos=2"], "policy_loss.loss_kwargs.tau_pos: vanilla has no such option"),
        (
            [
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.kl_loss_type=full",
                "+resource_pools.own.roles=[ref]",
            ],
            "take ref out of resource_pools.own.roles",
        ),
        (
            ["critic.ulysses_sequence_parallel_size=2", "critic.model.use_remove_padding=false"],
            "sequence parallelism shares packed rows out: set critic.model.use_remove_padding=true",
        ),
        (["actor_rollout_ref.rollout.name=server"], "set actor_rollout_ref.rollout.server.base_url, such as http"),
        ([*SERVER, "actor_rollout_ref.rollout.nnodes=1"], "generates on the server's devices: drop"),
        (
            [*SERVER, "trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=2"],
            "rollout.name=server: one process asks all servers: set actor_rollout_ref.rollout.nnodes=1",
        ),
        ([*SERVER, "actor_rollout_ref.rollout.temperature=0.7"], "log-probs at temperature 0.7 before"),
    ],
)
def test_contradictions_that_those_who_act_find(argv, line):
    with pytest.raises(UserError) as caught:
        load(argv, PPOConfig, check)
    [found] = str(caught.value).splitlines()
    assert line in found


def test_everything_is_told_at_once():
    argv = [
        "algorithm.adv_estimator=gdpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode=drow",
        "trainer.val_only=true",
    ]
    with pytest.raises(UserError) as caught:
        load([*argv, "actor_rollout_ref.rollout.dtype=float32", "algorithm.reward_binarize=true"], PPOConfig, check)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "trainer.val_only=true needs validation prompts",
        "actor_rollout_ref.rollout.dtype=float32, but rollout.name=native generates with the actor's own weights in "
        "bfloat16",
        "algorithm.adv_estimator=gdpo compares samples of one prompt",
        "algorithm.adv_estimator=gdpo needs algorithm.adv_kwargs.reward_keys",
        "algorithm.adv_estimator=gdpo reads reward components, which algorithm.reward_mask_ratio and "
        "algorithm.reward_binarize do not touch",
        "unknown policy loss 'drow'; did you mean dro?",
    ]


def test_unknown_names_offer_the_nearest():
    with pytest.raises(UserError, match=r"unknown advantage estimator 'gea'; did you mean gae"):
        load(["algorithm.adv_estimator=gea"], PPOConfig, check)
    with pytest.raises(UserError, match=r"unknown strategy 'fsdp3'; did you mean fsdp"):
        load(["critic.strategy=fsdp3"], PPOConfig, check)
    with pytest.raises(UserError, match=r"unknown actor_rollout_ref.rollout.name 'vlm'; did you mean vllm"):
        load(["actor_rollout_ref.rollout.name=vlm"], PPOConfig, check)
    assert load(["actor_rollout_ref.actor.strategy=fsdp"], PPOConfig, check).config.critic.strategy == "fsdp2"


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if ADVANTAGES[name].builtin])
def test_a_critic_is_on_by_default_exactly_where_the_estimator_needs_values(name):
    config = PPOConfig.model_validate({"algorithm": {"adv_estimator": name}})
    assert config.critic.enable == ADVANTAGES[name].capability.needs_critic


def inert(*argv: str) -> dict[str, str]:
    loaded = load(argv)
    return inert_settings(loaded.config, loaded.explicit_keys)


def test_settings_that_the_chosen_engine_does_not_read():
    key = "actor_rollout_ref.rollout"
    vllm = [f"{key}.gpu_memory_utilization=0.4", f"{key}.engine_kwargs.vllm.x=1", f"{key}.free_cache_engine=true"]
    native = inert(*vllm, f"{key}.max_num_seqs=8", f"{key}.engine_kwargs.sglang.x=1")
    assert native.keys() == {one.partition("=")[0] for one in [*vllm, f"{key}.engine_kwargs.sglang.x"]}
    assert set(native.values()) == {"no effect with rollout.name=native"}
    assert inert(f"{key}.name=vllm", *vllm) == {}
    assert inert(f"{key}.server.base_url=u").keys() == {f"{key}.server.base_url"}
    assert inert(*SERVER, *vllm, f"{key}.max_model_len=9000").keys() == {
        *(one.partition("=")[0] for one in vllm),
        f"{key}.max_model_len",
    }
    longer, of_vllm = f"{key}.max_model_len=9000", f"{key}.free_cache_engine=true"
    assert inert(longer, of_vllm, f"{key}.multi_turn.enable=true").keys() == {f"{key}.free_cache_engine"}


def test_settings_that_the_chosen_algorithms_do_not_read():
    assert inert("algorithm.lam_critic=0.9", "algorithm.adaptive_lam_alpha=1", "critic.cliprange_value=0.2") == {}
    argv = ["algorithm.adv_estimator=grpo", "algorithm.lam=0.9", "algorithm.norm_adv_by_std_in_grpo=false"]
    assert inert(*argv, "algorithm.adv_whitening=none", "data.val_files=v") == dict.fromkeys(
        ("algorithm.lam", "algorithm.adv_whitening"), "no effect: adv_estimator=grpo does not read it"
    )
    assert inert("algorithm.adv_estimator=gdpo", "algorithm.adv_whitening=none") == {}
    assert inert(*VTRACE, "algorithm.lam_critic=0.9", "algorithm.adaptive_lam_alpha=1") == {
        "algorithm.adaptive_lam_alpha": "no effect: adv_estimator=vtrace does not read it",
    }
    turns = ["algorithm.gae_unit=turn", "algorithm.lam_turn=0.9", "algorithm.gamma_turn=0.9"]
    assert inert(*turns) == {} and inert(*turns, "algorithm.adv_estimator=grpo").keys() == {
        turn.partition("=")[0] for turn in turns
    }
    assert inert(*turns[1:]) == dict.fromkeys(
        ("algorithm.gamma_turn", "algorithm.lam_turn"), "no effect with algorithm.gae_unit=token"
    )
    assert inert("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "actor_rollout_ref.actor.tau_pos=2") == {}
    clipped = inert("critic.value_loss=bce", "critic.cliprange_value=0.2")
    assert clipped == {"critic.cliprange_value": "no effect with critic.value_loss=bce, which does not clip"}
    gspo = [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean"]
    noted = inert_settings(load(gspo).config, {f"{ACTOR}.loss_agg_mode"})
    reason = "policy loss gspo always aggregates as seq-mean-token-mean: this is for other terms, and the critic"
    assert noted == {f"{ACTOR}.loss_agg_mode": reason}
    clips = [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.clip_ratio_c=4"]
    assert inert(*clips) == {} and inert(*clips, f"{ACTOR}.policy_loss.loss_mode=gspo").keys() == {
        f"{ACTOR}.clip_ratio_c"
    }
    assert inert(*clips, f"{ACTOR}.policy_loss.loss_mode=gpg").keys() == {clip.partition("=")[0] for clip in clips}
    assert inert(*clips, f"{ACTOR}.clip_ratio_low=0.1").keys() == {f"{ACTOR}.clip_ratio"}
    grpo = ["algorithm.adv_estimator=grpo", "algorithm.gamma=0.9"]  # of a critic's returns
    assert inert(*grpo).keys() == {"algorithm.gamma"} and inert(*grpo, "critic.enable=true") == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["algorithm.lam_actor=0.9", "algorithm.lam_critic=0.8"],  # also the one that has lam's value
        ["algorithm.lam_critic=1", "algorithm.adaptive_lam_alpha=0.05"],
        ["algorithm.lam_actor=0.95", "critic.kind=probe"],
    ],
)
def test_a_lambda_that_no_other_key_takes_has_no_effect(argv):
    lam = ["algorithm.lam=0.9", "critic.model.path=x"]
    assert "algorithm.lam" in inert(*lam, *argv) and "algorithm.lam" not in inert(*lam, argv[1])


def test_an_estimator_of_the_users_that_reads_lam(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "of_mine", replace(ADVANTAGES["gae"], function=lambda rewards, *, lam: None))
    assert inert("algorithm.adv_estimator=of_mine", "algorithm.lam=0.9") == {}
    assert inert("algorithm.adv_estimator=of_mine", "algorithm.gamma=0.9").keys() == {"algorithm.gamma"}


@pytest.mark.parametrize("chosen", [{}, {"algorithm.reward_source": "critic"}, {"algorithm.adv_estimator": "remax"}])
def test_settings_without_effect_change_no_phase(chosen):
    """Switches and choices that the run does not read."""

    def phases(config: PPOConfig) -> list[tuple[str, str, frozenset[str]]]:
        return [(phase.name, phase.plan(), phase.adds) for phase in phases_of(config)]

    standard, tried = PPOConfig.model_validate(nested(chosen)), 0
    for key in inert_settings(standard, [key.name for key in plain_keys(PPOConfig)]):
        kind = schema(PPOConfig)[key].info.annotation
        for value in (
            get_args(kind) if get_origin(kind) is Literal else {bool: [True, False], float: [0.5]}.get(kind, [])
        ):
            tried += 1
            assert phases(PPOConfig.model_validate(nested({**chosen, key: value}))) == phases(standard), key
    assert tried > 60


BF16 = "fsdp_config.model_dtype=bfloat16"


@pytest.mark.parametrize(
    ("argv", "roles"),
    [
        ([], []),
        ([f"actor_rollout_ref.actor.{BF16}"], ["actor_rollout_ref.actor", "critic"]),  # which follows the actor
        ([f"actor_rollout_ref.actor.{BF16}", "critic.freeze=true", "critic.model.path=x"], ["actor_rollout_ref.actor"]),
        ([f"actor_rollout_ref.actor.{BF16}", "algorithm.adv_estimator=grpo"], ["actor_rollout_ref.actor"]),
        ([f"critic.{BF16}"], ["critic"]),
        ([f"actor_rollout_ref.ref.{BF16}"], []),
    ],
)
def test_a_rate_too_small_for_bfloat16_weights_is_told(argv, roles):
    flat = dict(one.split("=", 1) for one in argv)
    lines = list(lost_in_rounding(PPOConfig.model_validate(nested(flat))))
    assert [line.partition(".fsdp_config")[0] for line in lines] == roles
    assert all("lost in rounding for every weight above" in line for line in lines)


@pytest.mark.parametrize(
    ("gib", "more", "told"),
    [
        (0.5, [], True),
        (0.5, ["trainer.nnodes=2"], False),  # another machine's
        (0.5, [f"{ACTOR}.strategy=megatron"], False),  # which is not planned
        (1.1, ["trainer.n_gpus_per_node=2"], True),  # what two processes share
        (2.2, ["trainer.n_gpus_per_node=2"], False),
        (1.1, [], False),
        (0.5, ["trainer.device=cuda"], False),
        (0.5, ["actor_rollout_ref.model.path=of/the-hub"], False),  # which a look at would download
    ],
)
def test_a_run_that_needs_more_memory_than_is_available_is_told(gib, more, told, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=gib * GIB, total=gib * GIB))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = arithmetic.make_model(tmp_path)
    lines = list(lacks_memory(load([f"actor_rollout_ref.model.path={model}", "data.train_batch_size=8", *more]).config))
    assert len(lines) == told and all(f"and {gib:.1f} are available" in line for line in lines)


OWN = """
import torch
from valor.algorithms import register_advantage, register_policy_loss, register_value_loss

@register_advantage("needs_values", needs_critic=True)
def needs_values(*, rewards, response_mask, values, scale=1.0):
    return (rewards - values) * scale * response_mask, rewards

@register_advantage("needs_greedy", needs_greedy_baseline=True)
def needs_greedy(*, rewards, response_mask, reward_baselines):
    return rewards * response_mask, rewards

@register_policy_loss("own_loss")
def own_loss(inputs):
    return inputs.aggregate(-inputs.advantages), {}

@register_value_loss("own_value_loss")
def own_value_loss(*, values, returns):
    return (values - returns) ** 2, torch.zeros_like(values), values
"""


def test_algorithms_of_a_users_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def run(*typed):
        return load([f"algorithm.custom_path={tmp_path / 'own.py'}", *typed], PPOConfig, check, derived).config

    losses = ("actor_rollout_ref.actor.policy_loss.loss_mode=own_loss", "critic.value_loss=own_value_loss")
    assert run("algorithm.adv_estimator=needs_values", "trainer.critic_warmup=1", *losses).critic.enable
    assert not run("algorithm.adv_estimator=needs_greedy").critic.enable
    with pytest.raises(UserError, match=r"needs_values needs a critic: set critic\.enable=true"):
        run("algorithm.adv_estimator=needs_values", "critic.enable=false")
    with pytest.raises(UserError, match="needs_greedy compares with greedy responses of the same weights"):
        run("algorithm.adv_estimator=needs_greedy", "trainer.v1.trainer_mode=separate_async")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("reads = frozenset(['nothing'])", "reads 'nothing', which no phase before it adds"),
        ("role = 'judge'", "runs in the role 'judge', which this run does not have"),
        ("contradictions = classmethod(lambda cls, config: ['mine does not go with this'])", "mine does not go with"),
    ],
)
def test_a_list_of_phases_that_cannot_run_is_told_with_the_other_mistakes(tmp_path, body, wrong):
    file = tmp_path / "phases.py"
    file.write_text(
        f"from valor.trainer.phases.base import Phase\nclass Mine(Phase):\n    name = 'mine'\n    {body}\n"
        "def phases(standard, config):\n    return [*standard, Mine(config)]\n"
    )
    assert any(wrong in line for line in check(load([f"algorithm.phases_path={file}"]).config))
