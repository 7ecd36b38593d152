"""What runs say of themselves: each fault is seen in a run that has it, and nothing is seen in healthy ones.

recorded_runs.json has what the rules read of real runs on the task of `valor demo` (a metric's values step by step; ""
where a step has none, null where it was not finite): the nine estimators of examples/lab/estimators.yaml, and runs that
are called by the fault they were started with.
"""

import json
import math
import random
from pathlib import Path

import pytest

from valor.tracking.diagnosis import RULES, Diagnosis

RECORDED = json.loads(Path(__file__).with_name("recorded_runs.json").read_text(encoding="utf-8"))
CRITIC_FREE = ["grpo", "DrGRPO", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg"]
HEALTHY = ["gae", *CRITIC_FREE]
FAULTS = {
    "reward always 0": ("constant_reward", "has the reward 0", "data_source"),
    "reward always 1": ("constant_reward", "has the reward 1", "harder prompts (data.train_files)"),
    "learning rate of 1e-9": (
        "flat_reward",
        "has not moved in 36 steps",
        "raise actor_rollout_ref.actor.optim.lr (1e-09)",
    ),
    "temperature 0.02": ("groups_without_signal", "for 100% of the prompts", "rollout.temperature (0.02)"),
    "critic learning rate of 1e-9": ("critic_does_not_learn", "at best 3.9e-06", "raise critic.optim.lr (1e-09)"),
    "rewards of 0 and 100": ("critic_does_not_learn", "critic.cliprange_value (0.5)", "critic.cliprange_value=null"),
    "entropy coefficient of -10": ("entropy", "explores no more", "entropy_coeff (-10)"),
    "length as reward": ("lengths", "100% of the responses are cut", "data.max_response_length (48)"),
    "KL coefficient of 1e-6": ("policy_runs_away", "KL 7.14 nats", "kl_loss_coef (1e-06)"),
    "learning rate of 1e-2": ("policy_runs_away", "one step moves the policy", "optim.lr (0.01)"),
    "clip range of 1e-3": ("clip_fraction", "the clip range stops", "clip_ratio (0.001)"),
    "samples 8 steps old": ("rollout_mismatch", "differ by 0.09", "rollout_is=token"),
    "loss of NaN": ("not_finite", "actor/grad_norm", "optim.lr (0.0001)"),
}


def steps_of(name: str) -> list[dict]:
    columns = RECORDED[name]["metrics"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [{key: value for key, value in row.items() if value != ""} for row in rows]


def diagnosed(name: str, steps: list[dict] | None = None) -> Diagnosis:
    found = Diagnosis(RECORDED[name]["settings"])
    for number, metrics in enumerate(steps or steps_of(name), start=1):
        found.add(number, metrics)
    return found


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_raise_no_alarm_at_any_step(name):
    assert diagnosed(name).findings == {}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_number_and_a_key(name):
    rule, text, remedy = FAULTS[name]
    finding = diagnosed(name).findings[rule]
    assert text in finding.text and remedy in finding.remedy


def test_every_rule_has_a_run_that_it_speaks_of():
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in FAULTS.values()} | {
        "nothing_trained",
        "out_of_memory",
        "critic_harms",
    }


@pytest.mark.parametrize(("ratio", "speaks"), [(1.7, True), (1.1, False), (0.5, False)])
def test_a_critic_that_leaves_more_variance_than_the_group_does_is_named(ratio, speaks):
    found = Diagnosis({})
    for step in range(1, 36):
        harm = {"critic/baseline_variance/critic": 0.2 * ratio, "critic/baseline_variance/group_mean": 0.2}
        split = {"critic/vf_explained_var_within": -0.3, "critic/vf_explained_var_between": 0.9}
        scores = {"critic/score/mean": 0.5, "critic/score/min": 0.0, "critic/score/max": 1.0}
        found.add(step, {"training/global_step": step, **scores, **harm, **split})
        assert ("critic_harms" in found.findings) is (speaks and step >= 20), step
    if speaks:
        finding = found.findings["critic_harms"]
        assert "1.7 times" in finding.text and "-0.3 within prompts, 0.9 between" in finding.text
        assert "critic.target=residual" in finding.remedy


@pytest.mark.parametrize(
    ("loss", "speaks"), [("vanilla", True), ("gspo", False), ("turn_ppo", False), ("cispo", False)]
)
def test_clipped_tokens_are_lost_under_losses_that_clip_single_ones(loss, speaks):
    found = Diagnosis({"actor_rollout_ref.actor.policy_loss.loss_mode": loss})
    for step, metrics in enumerate(steps_of("grpo"), start=1):
        found.add(step, metrics | {"actor/pg_clipfrac": 0.5})
    assert ("clip_fraction" in found.findings) is speaks


@pytest.mark.parametrize(("mode", "speaks"), [("token-mean", True), ("seq-mean-token-sum", False)])
def test_a_kl_term_that_is_a_sum_over_tokens_is_no_distance_of_a_token(mode, speaks):
    """3 nats a token are far; 3 nats a response of 48 tokens are not."""
    found = Diagnosis({"actor_rollout_ref.actor.loss_agg_mode": mode})
    for step, metrics in enumerate(steps_of("grpo"), start=1):
        found.add(step, metrics | {"actor/kl_loss": 3.0})
    assert ("policy_runs_away" in found.findings) is speaks


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        ({"algorithm.truncated_responses": "exclude"}, "training/left_out_ratio", "data.max_response_length"),
        ({"algorithm.reward_mask_ratio": 1.0}, "training/left_out_ratio", "algorithm.reward_mask_ratio (1)"),
        ({}, "rollout_corr/rollout_rs_masked_fraction", "rollout_rs_threshold"),
    ],
)
def test_a_step_that_trains_on_nothing_is_told_at_once(settings, key, remedy):
    (finding,) = Diagnosis(settings).add(1, {"training/global_step": 1, key: 1.0})
    assert finding.rule == "nothing_trained" and remedy in finding.remedy
    assert not Diagnosis(settings).add(1, {"training/global_step": 1, key: 0.9})


def test_an_update_that_had_to_be_repeated_names_the_key_of_its_size():
    steps = steps_of("grpo")
    steps[7] |= {"actor/oom_retries": 2.0, "actor/token_budget_min": 512.0}  # as microbatch.py reports it
    (finding,) = diagnosed("grpo", steps).findings.values()
    assert (finding.rule, finding.first, finding.last) == ("out_of_memory", 8, 8)
    assert "down to 512 tokens" in finding.text and "actor.ppo_max_token_len_per_gpu" in finding.remedy


def test_a_finding_is_told_once_and_again_much_later():
    found, told = Diagnosis({}), []
    for step in range(1, 31):
        metrics = dict.fromkeys(("critic/score/mean", "critic/score/min", "critic/score/max"), 0.0)
        told += [(one.rule, step) for one in found.add(step, metrics | {"training/global_step": step})]
    assert told == [("constant_reward", 5), ("constant_reward", 25)]
    assert (found.findings["constant_reward"].first, found.findings["constant_reward"].last) == (5, 30)


def test_a_run_that_has_learnt_everything_is_not_warned_of_its_reward():
    found = Diagnosis({})
    for step in range(1, 31):
        mean = min(0.05 * step, 1.0)
        metrics = {"critic/score/mean": mean, "critic/score/min": float(mean == 1), "critic/score/max": 1.0}
        found.add(step, metrics | {"training/global_step": step, "actor/lr": 1e-6})
    assert found.findings == {}


def still_step(step: int, **more: float) -> dict:
    same = {f"critic/score/{name}": 0.0 for name in ("mean", "min", "max")}
    return {"training/global_step": step, **same, "actor/grad_norm": 0.0, "actor/lr": 1e-6, **more}


def test_one_reward_and_no_gradient_is_told_from_the_first_step():
    (found,) = Diagnosis({}).add(1, still_step(1))
    assert (
        found.rule == "constant_reward"
        and "every response so far has the reward 0, and the gradient is 0" in found.text
    )
    assert Diagnosis({}).add(1, still_step(1, **{"actor/grad_norm": 0.5})) == []  # a critic's advantages move it


def test_a_critic_has_nothing_to_explain_where_every_return_is_the_same():
    def alarms(spread: float) -> set[str]:
        diagnosis = Diagnosis({"critic.optim.lr": 1e-5})
        for step in range(1, 41):
            late = step > 30  # solved
            numbers = {"critic/score/mean": 1.0 if late else 0.5, "critic/score/max": 1.0}
            numbers |= {
                "critic/score/min": 1.0 if late else 0.0,
                "critic/vf_explained_var": -0.5,
                "critic/vf_loss": 0.1,
            }
            numbers |= {"critic/returns/max": 1.0, "critic/returns/min": 1.0 - spread}
            diagnosis.add(step, still_step(step, **numbers))
        return {name for name, found in diagnosis.findings.items() if found.last > 35}

    assert "critic_does_not_learn" in alarms(0.5) and "critic_does_not_learn" not in alarms(0.0)


def test_rules_read_any_metrics_and_settings():
    """Of a closed-form critic, of a run that was resumed, of a key of the user's own: what is missing ends no run."""
    names = sorted({name for run in RECORDED.values() for name in run["metrics"]} | {"critic/vf_loss"})
    kinds = {"critic.kind": ("probe", "model"), "critic.cliprange_value": (0.5, None), "reward.reward_kwargs": (None,)}
    for seed in range(400):
        draw = random.Random(seed)
        run = Diagnosis({key: draw.choice(values) for key, values in kinds.items() if draw.random() < 0.8})
        numbers = {name: draw.choice([None, 0.0, 1e-9, 0.3, 1.0, 30.0, -3.0, math.nan, math.inf]) for name in names}
        there = draw.sample(names, draw.randrange(len(names) + 1))
        for step in range(1, 36):
            noise = draw.choice([0.0, 0.1])
            metrics = {name: x if (x := numbers[name]) is None else x + noise * draw.random() for name in there}
            run.add(step, metrics | {"training/global_step": step})


def test_a_critic_in_closed_form_that_explains_nothing_has_no_gradients_to_name():
    run = Diagnosis({"critic.kind": "probe", "critic.cliprange_value": 0.5, "data.train_batch_size": 8})
    for step in range(1, 31):
        ends = {"critic/returns/min": -2.5, "critic/returns/max": 2.5, "critic/vf_explained_var": -0.5}
        scores = {"critic/score/mean": 0.5 + step % 2, "critic/score/min": -2.5, "critic/score/max": 2.5}
        run.add(step, {"training/global_step": step, "critic/vf_loss": 1.0, **ends, **scores})
    finding = run.findings["critic_does_not_learn"]
    assert "explains nothing" in finding.text and "critic.kind=model" in finding.remedy
