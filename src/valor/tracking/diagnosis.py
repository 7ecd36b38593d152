"""Rules that find the usual faults of a run in its metrics, each with its number and the keys that help.

A rule reads the last steps, and the first ones where it compares. It reports what endangers learning, not what merely
differs from run to run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any

WINDOW = 5  # steps, the median of which is a metric's present (or its early) value
_QUIET_FOR = 20  # steps in which a finding is not repeated
_SCORE = "critic/score/mean"
_ACTOR = "actor_rollout_ref.actor"
_RATE = f"{_ACTOR}.optim.lr"
# Two clip whole sequences or turns, in a range so narrow that many always are; CISPO's clipped tokens are trained on.
_CLIPS_MUCH = ("gspo", "turn_ppo", "cispo")
Verdict = tuple[str, str]  # what is wrong, with its number; what to do


@dataclass(frozen=True)
class Finding:
    """A fault seen in the steps from `first` to `last`, as described at the last of them."""

    rule: str
    text: str
    remedy: str
    first: int
    last: int


class Diagnosis:
    """Follows a run step by step. `settings`: its configuration by dotted key."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.findings: dict[str, Finding] = {}  # by rule
        self.now: Mapping[str, Any] = {}
        self._series: dict[str, list[float]] = {}
        self.low, self.high = math.inf, -math.inf  # of all scores
        self._reported: dict[str, int] = {}  # step, by rule

    def add(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Add a step's metrics. Returns findings that were not reported in the last steps."""
        self.now = {k: v for k, v in metrics.items() if v is None or isinstance(v, int | float)}
        for key, value in self.now.items():
            if value is not None and math.isfinite(value):
                self._series.setdefault(key, []).append(value)
        self.low = min([self.low, *self.all("critic/score/min")[-1:]])
        self.high = max([self.high, *self.all("critic/score/max")[-1:]])
        news = []
        for rule in RULES if "training/global_step" in metrics else ():
            if verdict := rule(self):
                name = rule.__name__
                first = self.findings[name].first if name in self.findings else step
                self.findings[name] = Finding(name, *verdict, first, step)
                if step - self._reported.get(name, -math.inf) >= _QUIET_FOR:
                    self._reported[name] = step
                    news.append(self.findings[name])
        return news

    def all(self, key: str) -> list[float]:
        """The metric's finite numbers, in order."""
        return self._series.get(key, [])

    def last(self, *keys: str) -> float | None:
        """The present value of the first of these metrics that the run has; None before WINDOW steps."""
        return next((median(self.all(key)[-WINDOW:]) for key in keys if len(self.all(key)) >= WINDOW), None)

    def first(self, key: str) -> float:
        return median(self.all(key)[:WINDOW])

    @property
    def solved(self) -> float:
        """Where the mean score is between the lowest and the highest score of all responses, from 0 to 1."""
        return self._above(self.low)

    @property
    def gain(self) -> float:
        """By how much of that distance the mean score has risen."""
        early = self.all(_SCORE)[:WINDOW]
        return self._above(fmean(early)) if early else 0.0

    def key(self, name: str) -> str:
        """A key for a remedy, with its value: `critic.optim.lr (1e-05)`."""
        value = self.settings.get(name)
        return f"{name} ({value:g})" if isinstance(value, int | float) else name

    def _above(self, score: float) -> float:
        late = self.all(_SCORE)[-WINDOW:]
        return (fmean(late) - score) / (self.high - self.low) if late and self.high > self.low else 0.0


def not_finite(run: Diagnosis) -> Verdict | None:
    endings = ("/loss", "_loss", "/grad_norm")
    broken = [k for k, v in run.now.items() if k.endswith(endings) and (v is None or not math.isfinite(v))]
    broken = broken or [k for k, v in run.now.items() if k.endswith("/skipped") and v]
    if not broken:
        return None
    rates = {"actor/lr": _RATE, "critic/lr": "critic.optim.lr", "train/lr": "optim.lr"}
    rate = " and ".join(run.key(name) for key, name in rates.items() if key in run.now)
    limit = run.key("trainer.max_skipped_updates")
    return (
        f"{', '.join(broken)} not finite: such updates are skipped, and the run stops after {limit} in a row",
        f"lower {rate}, and look for NaN or huge numbers in the rewards",
    )


def nothing_trained(run: Diagnosis) -> Verdict | None:
    rejected = run.now.get("rollout_corr/rollout_rs_masked_fraction") == 1
    if not rejected and run.now.get("training/left_out_ratio") != 1:
        return None
    advice = f"lower {run.key('algorithm.reward_mask_ratio')}"
    if rejected:
        advice = "widen algorithm.rollout_correction.rollout_rs_threshold"
    elif run.settings.get("algorithm.truncated_responses") == "exclude":
        advice = f"raise {run.key('data.max_response_length')}, or set algorithm.truncated_responses=end"
    return "every response of the step was left out of training: the policy stays as it was", advice


def out_of_memory(run: Diagnosis) -> Verdict | None:
    sections = {"actor": f"{_ACTOR}.ppo_", "critic": "critic.ppo_", "train": ""}
    role = next((name for name in sections if run.now.get(f"{name}/oom_retries")), None)
    if role is None:
        return None
    retries, tokens = run.now[f"{role}/oom_retries"], run.now.get(f"{role}/token_budget_min") or 0
    return (
        f"{role} ran out of memory {retries:.0f} time(s); micro-batches were made smaller, down to {tokens:.0f} tokens,"
        " and repeated: nothing is lost but time",
        f"set {run.key(f'{sections[role]}max_token_len_per_gpu')} lower",
    )


def rollout_mismatch(run: Diagnosis) -> Verdict | None:
    gap, name = run.now.get("training/rollout_probs_diff_mean"), "trainer.rollout_probs_diff_warn"
    if gap is None or gap <= run.settings.get(name, math.inf):
        return None
    return (
        f"rollout and training probabilities differ by {gap:.3g} on average, more than {run.key(name)}: the samples "
        "are off-policy by this much",
        "correct for it (algorithm.rollout_correction.rollout_is=token), or give both sides one precision",
    )


def constant_reward(run: Diagnosis) -> Verdict | None:
    steps = min(len(run.all(_SCORE)), WINDOW)
    scores = {*run.all("critic/score/min")[-WINDOW:], *run.all("critic/score/max")[-WINDOW:]}
    still = not any(run.all("actor/grad_norm") or [1.0])  # seen from the first step on
    if (steps < WINDOW and not still) or len(scores) != 1 or (run.gain > 0 and run.solved == 1):
        return None
    (score,) = scores
    advice = "look at the samples (samples/, report.html): where answers are right, the grader does not see it "
    advice += "(data_source of the rows, custom_reward_function); else take easier prompts or a warm start (valor sft)"
    if score > 0 and score == run.high:
        advice = "take harder prompts (data.train_files), or a grader that does not say yes to everything"
    seen = f"every response {f'of the last {WINDOW} steps' if steps == WINDOW else 'so far'} has the reward {score:g}"
    return f"{seen}{', and the gradient is 0' if still else ''}: nothing can be learnt from it", advice


def groups_without_signal(run: Diagnosis) -> Verdict | None:
    equal, score, rollout = run.last("reward/equal_groups"), run.last(_SCORE), "actor_rollout_ref.rollout"
    if equal is None or score is None or run.low == run.high or equal - run.solved < 0.5:
        return None
    return (
        f"all samples of a prompt have the same score for {equal:.0%} of the prompts, at a mean score of "
        f"{score:.3g}: nothing is learnt from these",
        f"draw others instead (algorithm.filter_groups.enable=true), more of each ({run.key(f'{rollout}.n')}), at a "
        f"higher temperature ({run.key(f'{rollout}.temperature')}), or take easier prompts",
    )


def flat_reward(run: Diagnosis) -> Verdict | None:
    trained, part = len(run.all("actor/lr")), 15
    scores = run.all(_SCORE)[-trained:]
    if min(trained, len(scores)) < 2 * part or run.low == run.high or run.solved > 0.9:
        return None
    early, late = scores[:part], scores[-part:]
    change, noise = fmean(late) - fmean(early), math.sqrt((variance(early) + variance(late)) / part)
    if change >= 2 * noise:
        return None
    verb, turn = ("has not moved", "raise") if change > -2 * noise else ("has fallen", "lower")
    return (
        f"the mean reward {verb} in {trained} steps of training the policy: {fmean(early):.3g} in the first {part}, "
        f"{fmean(late):.3g} in the last (their noise: {noise:.2g})",
        f"{turn} {run.key(_RATE)}, or draw more samples a step ({run.key('data.train_batch_size')})",
    )


def critic_does_not_learn(run: Diagnosis) -> Verdict | None:
    explained, trained = run.all("critic/vf_explained_var"), len(run.all("critic/vf_loss"))
    present = run.last("critic/vf_explained_var")
    ends = [run.all(f"critic/returns/{end}")[-WINDOW:] for end in ("min", "max")]
    if present is None or run.low == run.high or (ends[0] and ends[0] == ends[1]):  # equal returns have no variance
        return None
    misleads = trained >= 10 and present < -0.2 and 0.1 < run.solved < 0.9
    if not misleads and (trained < 20 or max(explained) > 0.05):
        return None
    seen = f"the critic explains nothing of the returns: explained variance {present:.2g}, at best "
    seen += f"{max(explained):.2g}, in {trained} steps of training; "
    reach = max(abs(run.now.get(f"critic/returns/{end}") or 0.0) for end in ("min", "max"))
    norm = run.last("critic/grad_norm")  # of a regression there is none
    if norm is not None and reach > 4 * (run.settings.get("critic.cliprange_value") or math.inf):
        clip = run.key("critic.cliprange_value")
        return (
            f"{seen}returns reach {reach:.3g}, a step moves a value by at most {clip}, and gradients (norm {norm:.3g}) "
            f"are cut to {run.key('critic.optim.clip_grad')}",
            "bring rewards to a scale of 1, or set critic.cliprange_value=null and raise critic.optim.clip_grad",
        )
    seen += f"value loss {run.last('critic/vf_loss'):.3g}, was {run.first('critic/vf_loss'):.3g}"
    if run.settings.get("critic.kind") == "probe":
        return seen, f"draw more samples a step ({run.key('data.train_batch_size')}), or take critic.kind=model"
    return (
        seen,
        f"{'lower' if misleads else 'raise'} {run.key('critic.optim.lr')}, give it more updates "
        f"({run.key('critic.ppo_epochs')}) and a start ({run.key('trainer.critic_warmup')})",
    )


def critic_harms(run: Diagnosis) -> Verdict | None:
    pairs = [*zip(*(run.all(f"critic/baseline_variance/{name}") for name in ("critic", "group_mean")), strict=False)]
    ratios = [with_critic / without for with_critic, without in pairs[-2 * WINDOW :] if without > 0]
    if len(pairs) < 20 or len(ratios) < 2 * WINDOW or median(ratios) < 1.2 or run.solved > 0.9:
        return None
    within, between = (run.last(f"critic/vf_explained_var_{part}") for part in ("within", "between"))
    several = within is not None and between is not None  # samples of a prompt
    others = "a prompt's" if several else "the batch's"
    split = f" (explained variance {within:.2g} within prompts, {between:.2g} between them)" if several else ""
    return (
        f"the critic makes advantages noisier: {median(ratios):.2g} times the variance that the mean of {others} other "
        f"samples leaves{split}",
        "let it learn what that mean leaves (critic.target=residual, rollout.n of 2 or more), take critic.kind=probe, "
        "or an estimator without a critic",
    )


def entropy(run: Diagnosis) -> Verdict | None:
    last = run.last("actor/entropy")
    if last is None or len(run.all("actor/lr")) < 10 or run.gain > 0.05 or run.solved > 0.9:
        return None
    first = run.first("actor/entropy")
    seen = f"entropy went from {first:.2g} to {last:.2g} nats a token while the reward gained nothing"
    coefficient, lr = run.key(f"{_ACTOR}.entropy_coeff"), run.key(_RATE)
    if last > 3 * first and last > 1:
        return f"{seen}: the policy writes noise", f"lower {lr} and {coefficient}, add {_ACTOR}.use_kl_loss=true"
    if last >= max(0.4 * first, 1e-3):
        return None
    advice = f"lower {lr}, raise {coefficient} or {run.key(f'{_ACTOR}.clip_ratio_high')}, sample at a temperature of 1"
    return f"{seen}: the policy explores no more", advice


def lengths(run: Diagnosis) -> Verdict | None:
    length, cut = run.last("response_length/mean"), run.last("response_length/clip_ratio")
    if length is None or cut is None:
        return None
    first = run.first("response_length/mean")
    grown = length > 2 * first and run.gain < 0.05
    if cut < (0.1 if grown else 0.3):
        return None
    return (
        f"{cut:.0%} of the responses are cut off at the length limit, and graded without their end (mean length "
        f"{length:.0f} tokens, was {first:.0f})",
        f"raise {run.key('data.max_response_length')}, or punish length (reward.reward_manager.name=dapo with its "
        "overlong buffer); look whether answers come with an end of sequence",
    )


def policy_runs_away(run: Diagnosis) -> Verdict | None:
    is_mean = run.settings.get(f"{_ACTOR}.loss_agg_mode", "token-mean").endswith("token-mean")
    far = run.last(*["actor/kl_loss"] * is_mean, "actor/reward_kl_penalty")  # of other modes it is no KL of a token
    step = run.last("actor/ppo_kl")
    if far is not None and far > 1:
        coefficients = f"{run.key(f'{_ACTOR}.kl_loss_coef')} or {run.key('algorithm.kl_ctrl.kl_coef')}"
        seen = f"the policy has run away from the reference: KL {far:.3g} nats a token"
        return seen, f"raise {coefficients}, lower {run.key(_RATE)}"
    if step is not None and step > 0.1:
        seen = f"one step moves the policy by a KL of {step:.3g} nats a token"
        return seen, f"lower {run.key(_RATE)} or {run.key(f'{_ACTOR}.ppo_epochs')}"
    return None


def clip_fraction(run: Diagnosis) -> Verdict | None:
    clipped = run.last("actor/pg_clipfrac")
    loss = run.settings.get(f"{_ACTOR}.policy_loss.loss_mode")
    if clipped is None or clipped < 0.3 or loss in _CLIPS_MUCH:
        return None
    return (
        f"the clip range stops {clipped:.0%} of the tokens: most of each batch teaches nothing",
        f"lower {run.key(_RATE)} or {run.key(f'{_ACTOR}.ppo_epochs')}, take larger mini-batches "
        f"({run.key(f'{_ACTOR}.ppo_mini_batch_size')}), or widen {run.key(f'{_ACTOR}.clip_ratio')}",
    )


RULES: list[Callable[[Diagnosis], Verdict | None]] = [not_finite, nothing_trained, out_of_memory, rollout_mismatch]
RULES += [
    constant_reward,
    groups_without_signal,
    flat_reward,
    critic_does_not_learn,
    critic_harms,
    entropy,
    lengths,
    policy_runs_away,
    clip_fraction,
]
