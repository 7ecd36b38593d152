"""Every algorithm of the catalogue is one configuration key away, and trains."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import read_metrics, weights
from safetensors.torch import load_file

from valor.algorithms import ADVANTAGES, POLICY_LOSSES
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

STEPS = 2
CORRECTION = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
# What an algorithm asks for beyond its name.
NEEDS = {
    "gdpo": ["algorithm.gdpo_reward_keys=[short,digits]", "algorithm.gdpo_reward_weights=[1,0.5]"],
    "dro": [f"{ACTOR}.policy_loss.dro_beta=0.1"],
    "gspo": [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
    "turn_ppo": [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
    "clip_cov": [f"{ACTOR}.policy_loss.clip_cov_lb=-5", f"{ACTOR}.policy_loss.clip_cov_ratio=0.2"],
    "kl_cov": [f"{ACTOR}.policy_loss.kl_cov_ratio=0.2"],
}
BUILTIN_ESTIMATORS = [n for n in ADVANTAGES if ADVANTAGES[n].builtin]
BUILTIN_LOSSES = [n for n in POLICY_LOSSES if POLICY_LOSSES[n].builtin]
Train = Callable[..., list[dict[str, float]]]


@pytest.fixture
def train(overrides, tiny, tmp_path) -> Train:
    """Runs two steps of two updates each; the metrics a step, after checking that they are finite and weights moved."""

    def run(*settings: str, name: str = "run", moves: bool = True) -> list[dict[str, float]]:
        run_dir = tmp_path / name
        small = [
            "data.val_files=null",
            "data.train_batch_size=4",
            f"{ACTOR}.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
            f"trainer.total_training_steps={STEPS}",
            f"reward.custom_reward_function.path={Path(__file__).with_name('component_reward.py')}",
        ]
        assert main(overrides(run_dir, *small, *settings)) == 0
        rows = read_metrics(run_dir)
        assert len(rows) == STEPS
        for row in rows:
            assert {"actor/grad_norm", "critic/score/mean"} <= row.keys() and ("actor/pg_loss" in row) == moves
            assert all(math.isfinite(v) for k, v in row.items() if k.startswith(("actor/", "rollout_corr/"))), row
            assert row["actor/skipped"] == 0
        if moves:
            assert moved(tiny["model"], run_dir, "actor") > 1e-4
        return rows

    return run


def moved(model: Path, run_dir: Path, role: str) -> float:
    """The largest change of a weight that the start has too."""
    before, after = load_file(model / "model.safetensors"), weights(run_dir, role)
    return max(float((after[name] - tensor).abs().max()) for name, tensor in before.items() if name in after)


@pytest.mark.parametrize("estimator", BUILTIN_ESTIMATORS)
def test_each_estimator_with_its_natural_loss(estimator, train):
    capability = ADVANTAGES[estimator].capability
    loss = {"ppo": "vanilla"}.get(capability.natural_loss, capability.natural_loss)
    rows = train(
        f"algorithm.adv_estimator={estimator}", f"{ACTOR}.policy_loss.loss_mode={loss}", *NEEDS.get(estimator, [])
    )
    assert any(row["critic/advantages/max"] > 0 for row in rows)
    assert all("actor/ppo_kl" in row for row in rows)
    assert capability.needs_critic == all("critic/vf_loss" in row for row in rows)


@pytest.mark.parametrize("loss", BUILTIN_LOSSES)
def test_each_policy_loss_with_grpo(loss, train):
    rows = train("algorithm.adv_estimator=grpo", f"{ACTOR}.policy_loss.loss_mode={loss}", *NEEDS.get(loss, []))
    clips = {"ppo", "vanilla", "gspo", "turn_ppo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl"}
    assert all("actor/ppo_kl" in row and ("actor/pg_clipfrac" in row) == (loss in clips) for row in rows)


def test_a_loss_that_draws_repeats_and_resumes_to_the_bit(train, tmp_path):
    settings = ["algorithm.adv_estimator=grpo", f"{ACTOR}.policy_loss.loss_mode=clip_cov", *NEEDS["clip_cov"]]
    settings.append("trainer.save_freq=1")
    rows = train(*settings, name="whole")
    assert any(row["actor/pg_clipfrac_cov"] > 0 for row in rows)
    before = weights(tmp_path / "whole", "actor")
    torch.manual_seed(1)  # nothing may depend on the global generator
    for leftover in ("global_step_2", "huggingface"):
        shutil.move(tmp_path / "whole" / leftover, tmp_path / leftover)
    assert train(*settings, name="whole") == rows
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "whole", "actor").items())


def test_dr_grpo(train):
    rows = train(
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    )
    assert all(row["critic/advantages/max"] <= 1.0 for row in rows)  # scores are 0 and 1, less their mean


@pytest.mark.parametrize(
    "settings",
    [
        ["value_loss=huber", "value_loss_kwargs={huber_delta:0.5}"],
        ["value_loss=bce"],
        ["value_loss=hl_gauss", "value_loss_kwargs={num_bins:11,value_max:2.0}"],
        ["value_loss=mse", "cliprange_value=null"],
    ],
    ids=["huber", "bce", "hl_gauss", "unclipped"],
)
def test_each_value_loss(settings, train, tiny, tmp_path):
    rows = train(*[f"critic.{s}" for s in settings], "critic.optim.lr=1e-2")
    assert all(math.isfinite(row["critic/vf_loss"]) for row in rows)
    assert moved(tiny["model"], tmp_path / "run", "critic") > 1e-4
    head = json.loads((tmp_path / "run" / "huggingface" / "critic" / "config.json").read_text())
    if "value_loss=bce" in settings:
        # An untrained head gives the logit 0: probability one half; afterwards the values are probabilities still.
        assert rows[0]["critic/values/min"] == rows[0]["critic/values/max"] == 0.5
        assert 0 < rows[1]["critic/values/min"] < rows[1]["critic/values/max"] < 1
        assert head["value_head_output"] == "logit"
    elif "value_loss=hl_gauss" in settings:
        # An untrained head gives every bin the same share: the middle; afterwards values stay within the range.
        assert rows[0]["critic/values/min"] == pytest.approx(1.0) == rows[0]["critic/values/max"]
        assert 0 < rows[1]["critic/values/min"] < rows[1]["critic/values/max"] < 2
        assert rows[0]["critic/vf_loss"] <= math.log(11) + 1e-4
        kept = ("value_head_output", "value_min", "value_max")
        assert [head[k] for k in kept] == ["bins", 0.0, 2.0] and len(head["id2label"]) == 11
    else:
        assert rows[0]["critic/values/max"] == 0.0 and head["value_head_output"] == "value"


HL_GAUSS = ("critic.value_loss=hl_gauss", "critic.value_loss_kwargs={num_bins:11}", "critic.optim.lr=1e-2")


def test_a_critic_of_bins_resumes_to_the_bit_and_is_a_warm_start(train, tmp_path):
    rows = train(*HL_GAUSS, "trainer.save_freq=1", name="whole")
    before, critic = weights(tmp_path / "whole", "critic"), tmp_path / "whole" / "huggingface" / "critic"
    shutil.copytree(critic, tmp_path / "critic")
    for leftover in ("global_step_2", "huggingface"):
        shutil.move(tmp_path / "whole" / leftover, tmp_path / leftover)
    assert train(*HL_GAUSS, "trainer.save_freq=1", name="whole") == rows
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "whole", "critic").items())
    warm = train(*HL_GAUSS, f"critic.model.path={tmp_path / 'critic'}", name="warm")
    assert warm[0]["critic/values/min"] < warm[0]["critic/values/max"]  # not a new head


def test_a_critic_is_not_taken_for_one_of_another_kind(train, overrides, tmp_path, capsys):
    train(*HL_GAUSS)
    warm = f"critic.model.path={tmp_path / 'run' / 'huggingface' / 'critic'}"
    for other in ("mse", "bce", "hl_gauss"):
        assert main(overrides(tmp_path / other, warm, f"critic.value_loss={other}")) == 2
        error = capsys.readouterr().err
        assert "gives 11 bins from 0 to 1" in error and "critic.value_loss" in error and "Traceback" not in error
    frozen = train(warm, "critic.freeze=true", name="frozen")  # read as its config.json says
    assert 0 < frozen[0]["critic/values/min"] < frozen[0]["critic/values/max"] < 1


@pytest.mark.parametrize("bins", ["{num_bins:1}", "{num_bins:2.5}", "{value_min:low}", "{value_min:1.0}"])
def test_bins_that_cannot_be(bins, overrides, tmp_path, capsys):
    wrong = overrides(tmp_path / "run", "critic.value_loss=hl_gauss", f"critic.value_loss_kwargs={bins}")
    assert_refused(wrong, ["hl_gauss", "value_min"], capsys)


EXACT_KL = (
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_type=full",
    f"{ACTOR}.optim.lr=1e-2",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_penalty=full",
)
KL_METRICS = ("actor/kl_loss", "actor/reward_kl_penalty")


@pytest.mark.usefixtures("hosts")
def test_the_exact_kl_in_loss_and_reward(train, tmp_path):
    weights = (f"{ACTOR}.kl_loss_coef=0.5", "algorithm.kl_ctrl.kl_coef=0.5")
    rows = train(*EXACT_KL, *weights, name="one")
    assert rows[0]["actor/reward_kl_penalty"] == 0.0  # the actor still is the reference, to the bit
    assert rows[1]["actor/reward_kl_penalty"] > 0 and all(row["actor/kl_loss"] > 0 for row in rows)
    assert rows[1]["critic/rewards/mean"] < rows[1]["critic/score/mean"]
    assert "timing_s/ref" not in (tmp_path / "one" / "metrics.jsonl").read_text()  # no pass of its own
    two = train(*EXACT_KL, *weights, "trainer.n_gpus_per_node=2", name="two")
    for name in (*KL_METRICS, "actor/grad_norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in rows], abs=1e-4, rel=1e-3), name


def test_k3_estimates_the_exact_kl(train):
    """With weights of 0 the two runs take the same steps on the same samples."""
    zero = (f"{ACTOR}.kl_loss_coef=0", "algorithm.kl_ctrl.kl_coef=0")
    exact = train(*EXACT_KL, *zero, name="exact")
    estimated = train(*EXACT_KL, *zero, f"{ACTOR}.kl_loss_type=k3", "algorithm.kl_penalty=k3", name="k3")
    for name in KL_METRICS:
        assert exact[1][name] == pytest.approx(estimated[1][name], rel=0.5) and exact[1][name] > 0.01
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"):
        assert exact[1][name] == pytest.approx(estimated[1][name], abs=1e-6), name


def test_decoupled_and_adaptive_lambda_and_bootstrap(train):
    plain = train("algorithm.lam=0.9", "critic.optim.lr=1e-2", name="plain")
    for number, setting in enumerate(
        ("algorithm.lam_critic=1.0", "algorithm.adaptive_lam_alpha=0.5", "algorithm.truncated_responses=bootstrap")
    ):
        other = train("algorithm.lam=0.9", "critic.optim.lr=1e-2", setting, name=f"other{number}")
        assert plain[0] == {**other[0], **{k: v for k, v in plain[0].items() if k.startswith(("critic/", "actor/"))}}
        assert plain[1]["critic/returns/mean"] != other[1]["critic/returns/mean"]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_truncated_responses_in_no_loss(train, estimator):
    """The same samples and advantages, of which fewer are learnt from."""
    settings = (f"algorithm.adv_estimator={estimator}", "data.max_response_length=32")
    plain = train(*settings, name="plain")[0]
    other = train(*settings, "algorithm.truncated_responses=exclude", name="exclude")[0]
    assert 0 < plain["response_length/clip_ratio"] < 1
    for name in ("critic/score/mean", "critic/advantages/max", "response_length/mean"):
        assert plain[name] == other[name], name
    assert plain["actor/grad_norm"] != other["actor/grad_norm"]


def test_vtrace_of_fresh_samples_is_gae(train, tmp_path):
    """One update a batch: the old log-probs are recomputed all the same, and differ from the engine's by rounding."""
    settings = ("algorithm.lam=0.9", "critic.optim.lr=1e-2", f"{ACTOR}.ppo_mini_batch_size=4")
    plain = train(*settings, name="plain")
    found = train(*settings, "algorithm.adv_estimator=vtrace", name="vtrace")
    for name in ("critic/advantages/max", "critic/returns/mean", "critic/vf_loss", "actor/grad_norm"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in plain], rel=1e-3, abs=1e-5), name
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("plain", "vtrace")]
    assert ["timing_s/old_log_prob" in text for text in texts] == [False, True]


def test_gae_by_turns(train):
    """A single answer is an episode of one turn: bilevel is plain GAE, and the unit turn trains the critic at the first
    token of each response, so that with equal weights its loss is another."""
    settings = ("critic.optim.lr=1e-2", "critic.cliprange_value=null")
    plain = train(*settings, "algorithm.lam=0.9", name="plain")
    inside = train(*settings, "algorithm.lam=0.9", "algorithm.gae_unit=bilevel", name="bilevel")
    for name in ("critic/advantages/max", "critic/returns/mean", "critic/vf_loss", "actor/grad_norm"):
        assert [row[name] for row in inside] == pytest.approx([row[name] for row in plain], rel=1e-3, abs=1e-5), name
    turns = train(*settings, "algorithm.gae_unit=turn", name="turn")
    assert turns[0]["critic/score/mean"] == plain[0]["critic/score/mean"]
    assert turns[0]["critic/returns/mean"] == pytest.approx(turns[0]["critic/score/mean"])  # a response counts once
    assert turns[1]["critic/values/max"] != plain[1]["critic/values/max"]


@pytest.mark.parametrize(("estimator", "level"), [("grpo", "sequence"), ("gae", "sequence"), ("vtrace", "prefix")])
def test_rollout_correction_of_the_recomputed_log_probs(estimator, level, train):
    rows = train(
        f"algorithm.adv_estimator={estimator}",
        f"{CORRECTION}.rollout_is={level}",
        f"{CORRECTION}.rollout_is_threshold=0.5_2.0",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.5_2.0",
    )
    for row in rows:  # the native engine is exact: nothing to correct
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        assert row["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_rollout_correction_in_bypass_mode(loss_type, train, tmp_path):
    rows = train(
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_epochs=3",
        f"{ACTOR}.optim.lr=1e-2",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.loss_type={loss_type}",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.8_1.25",
    )
    for row in rows:  # from the second update on, the policy has left the one that sampled
        assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1
        assert (row.get("rollout_corr/rollout_is_std", 0) > 0) == (loss_type == "reinforce")
        assert row["training/rollout_probs_diff_max"] < 1e-5  # the engine's own gap, before the first update
    assert "timing_s/old_log_prob" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("estimator", "bypass", "roles"), [("gae", "false", ("actor", "critic")), ("grpo", "true", ("actor",))]
)
def test_rejecting_everything_is_a_step_without_effect(estimator, bypass, roles, train, tiny, tmp_path):
    rows = train(
        f"algorithm.adv_estimator={estimator}",
        f"{CORRECTION}.bypass_mode={bypass}",
        f"{CORRECTION}.rollout_rs=seq_sum_k1",
        f"{CORRECTION}.rollout_rs_threshold=8_9",
        moves=False,
    )
    assert all(row["actor/grad_norm"] == 0 for row in rows)
    assert all(row["rollout_corr/rollout_rs_seq_masked_fraction"] == 1 for row in rows)
    assert all(moved(tiny["model"], tmp_path / "run", role) == 0 for role in roles)


def test_overlong_responses_are_penalised(train):
    rows = train(
        "reward.reward_manager.name=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=2.0",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=true",
    )
    for row in rows:  # an untrained model runs into the limit: the whole penalty
        assert row["response_length/clip_ratio"] > 0.5
        assert row["reward/valor/arithmetic/overlong_reward"] < -1
        assert row["critic/score/min"] == -2.0
        assert row["reward/valor/arithmetic/acc"] == row["reward/valor/arithmetic/correct"]


class TestDynamicSampling:
    """`algorithm.filter_groups`: prompts whose samples agree are replaced."""

    ON = ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2")

    def test_draws_until_there_are_enough(self, train):
        rows = train(*self.ON, "data.gen_batch_size=3", "algorithm.filter_groups.metric=acc")
        for row in rows:
            rounds, prompts = (row[f"training/filter_groups/{k}"] for k in ("num_gen_batches", "prompts"))
            assert rounds >= 2 and prompts == 3 * rounds  # 4 are wanted, 3 drawn at once
            # Two samples of a prompt differ: one is right, one is wrong.
            assert row["critic/score/mean"] == 0.5
            assert row["critic/advantages/max"] > 0

    def test_resumes_with_the_same_prompts(self, overrides, train, tmp_path):
        saved = [*self.ON, "data.gen_batch_size=3", "trainer.save_freq=1"]
        rows = train(*saved, name="whole")
        first = json.loads((tmp_path / "whole" / "global_step_1" / "trainer.json").read_text())
        assert first["sampler"]["position"] == rows[0]["training/filter_groups/prompts"]
        for leftover in ("global_step_2", "huggingface"):
            shutil.move(tmp_path / "whole" / leftover, tmp_path / leftover)
        assert train(*saved, name="whole") == rows

    def test_stops_at_the_limit(self, overrides, tmp_path, capsys):
        code = main(
            overrides(
                tmp_path / "run",
                *self.ON,
                "data.val_files=null",
                "algorithm.filter_groups.metric=never",
                "algorithm.filter_groups.max_num_gen_batches=2",
                f"reward.custom_reward_function.path={_constant_reward(tmp_path)}",
            )
        )
        error = capsys.readouterr().err
        assert code == 1 and "algorithm.filter_groups.max_num_gen_batches=2" in error and "0 of 8 prompts" in error

    @pytest.mark.parametrize("name", ["accuracy", "said"])
    def test_a_metric_that_is_no_number_is_named(self, overrides, tmp_path, capsys, name):
        reward = f"reward.custom_reward_function.path={_constant_reward(tmp_path)}"
        code = main(overrides(tmp_path / "run", *self.ON, reward, f"algorithm.filter_groups.metric={name}"))
        error = capsys.readouterr().err
        assert code == 2 and f"metric={name} is not a number" in error and "reports never)" in error


def _constant_reward(folder: Path) -> Path:
    file = folder / "constant_reward.py"
    file.write_text(
        "def compute_score(*, solution_str, **_):\n    return {'score': 1.0, 'never': 0.0, 'said': 'nothing'}\n"
    )
    return file


MINE = '''
from valor.algorithms import register_advantage, register_policy_loss, register_value_loss

@register_advantage("mine", needs_critic=True)
def my_advantage(*, rewards, response_mask, values, old_log_probs, scale=1.0):
    """Score minus value, on every policy token."""
    assert old_log_probs.shape == rewards.shape
    advantages = scale * (rewards.sum(-1, keepdim=True) - values) * response_mask
    return advantages, rewards.sum(-1, keepdim=True) * response_mask

@register_policy_loss("mine")
def my_loss(inputs, *, power=1.0):
    """Plain policy gradient with a metric of its own."""
    return inputs.aggregate(-inputs.advantages * inputs.log_probs * power), {"my_count": inputs.fraction(
        inputs.response_mask)}

@register_value_loss("mine")
def my_value_loss(values, returns, *, weight=1.0):
    """Absolute error."""
    error = weight * (values - returns).abs()
    return error, error.detach() * 0, values.detach()
'''
USE_MINE = (
    "algorithm.adv_estimator=mine",
    "algorithm.adv_kwargs={scale:2.0}",
    f"{ACTOR}.policy_loss.loss_mode=mine",
    f"{ACTOR}.policy_loss.loss_kwargs={{power:0.5}}",
    "critic.enable=true",
    "critic.value_loss=mine",
    "critic.value_loss_kwargs={weight:2.0}",
)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("mine") / "my_algo.py"
    file.write_text(MINE)
    return f"algorithm.custom_path={file}"


@pytest.mark.usefixtures("hosts")
def test_algorithms_of_the_users_own_in_process_and_under_ray(mine, train):
    rows = train(mine, *USE_MINE)
    assert all(row["actor/my_count"] == pytest.approx(1.0) and row["critic/vf_loss"] >= 0 for row in rows)
    assert train(mine, *USE_MINE, "trainer.controller=ray", name="ray") == rows


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.adv_kwargs={scales:1}"], ["algorithm.adv_kwargs.scales", "scale"]),
        ([f"{ACTOR}.policy_loss.loss_kwargs={{clip_ratio_low:1}}"], ["loss_kwargs.clip_ratio_low", "a key of its own"]),
        (["critic.value_loss_kwargs={delta:1}"], ["critic.value_loss_kwargs.delta", "weight"]),
        (["critic.enable=false"], ["mine needs a critic"]),
        (["algorithm.truncated_responses=bootstrap"], ["algorithm.truncated_responses=bootstrap", "mine"]),
    ],
)
def test_mistakes_about_ones_own_algorithms(settings, words, mine, overrides, tmp_path, capsys):
    assert_refused(overrides(tmp_path / "run", mine, *USE_MINE, *settings), words, capsys)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.adv_estimator=gdpo"], ["algorithm.adv_kwargs.reward_keys"]),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1"], ["actor_rollout_ref.rollout.n", "2"]),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", f"{CORRECTION}.bypass_mode=true"],
            ["optimal_token_baseline", "bypass_mode"],
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-sum"],
            ["gspo", "seq-mean-token-mean", "loss_agg_mode=token-sum"],
        ),
        (["critic.value_loss=msee"], ["msee", "mse"]),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=-1_2"], ["rollout_is_threshold"]),
        ([f"{CORRECTION}.rollout_rs=token_k9", f"{CORRECTION}.rollout_rs_threshold=1"], ["token_k9", "token_k3"]),
        (
            ["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=1"],
            ["algorithm.filter_groups", "actor_rollout_ref.rollout.n"],
        ),
    ],
)
def test_needs_are_checked_before_any_model_is_loaded(settings, words, overrides, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    no_model = f"actor_rollout_ref.model.path={tmp_path / 'empty'}"
    assert_refused(overrides(tmp_path / "run", no_model, *settings), words, capsys)


def assert_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert "Traceback" not in error and "/empty" not in error


def test_a_prompts_only_sample_can_keep_its_score(train):
    rows = train("algorithm.adv_estimator=rloo", "algorithm.singleton=raw", "actor_rollout_ref.rollout.n=1")
    for row in rows:
        assert row["critic/advantages/max"] == row["critic/score/max"] == 1.0
