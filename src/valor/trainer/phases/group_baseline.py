"""Values that begin at the mean outcome of the prompt's other samples, and follow the critic from there."""

from collections.abc import Iterator

import torch

from valor.algorithms.groups import mean_of_others
from valor.config import PPOConfig
from valor.data.balance import grouped
from valor.data.batch import Batch, Episodes
from valor.errors import StepRefused
from valor.trainer.phases.base import Metrics, Phase, where_true

BASELINE, OUTPUTS = "group_baseline", "critic_outputs"  # columns [B] and [B, T]


class GroupBaseline(Phase):
    """`critic.target=residual`: V = mean outcome of the prompt's other samples + C, which learns what that mean leaves.

    `anchored`: V(s) = that mean + C(s) - C(s_0), where C learns returns and s_0 is the state before the first token.
    Other samples say nothing about this one's tokens, so that neither adds a bias at lambda 1.
    """

    name = "group_baseline"
    timer = "adv"
    reads = frozenset(("response_mask", "response_lengths", "token_level_rewards", "uid", "values"))
    reads_if_there = frozenset(("episode", "bootstrap_values"))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        end = ["bootstrap_values"] * config.algorithm.truncation_bootstrap
        self.anchored = config.critic.target == "anchored"
        self.adds = frozenset((OUTPUTS, "values", *end, *([] if self.anchored else [BASELINE])))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.critic.enable and config.critic.target != "absolute"

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        algorithm, critic, n = config.algorithm, config.critic, config.actor_rollout_ref.rollout.n
        value_loss = critic.value_loss if config.has_value_model else ""
        low = critic.value_loss_kwargs.get("value_min", 0.0)
        discounts = algorithm.gamma < 1 or (algorithm.gae_unit != "token" and algorithm.gamma_turn < 1)
        name, residual = f"critic.target={critic.target}", critic.target == "residual"
        by_turn = algorithm.adv_estimator == "gae" and algorithm.gae_unit != "token"
        lambdas = [algorithm.lam if algorithm.lam_critic is None else algorithm.lam_critic]
        lambdas += [algorithm.lam_turn] * by_turn
        wrong = {
            f"{name} compares samples of one prompt: set actor_rollout_ref.rollout.n to at least 2, or "
            "critic.target=absolute": n < 2,
            f"{name} adds one number to all values of a response, which is right without discounts alone: set "
            "algorithm.gamma=1 (and gamma_turn=1), or critic.target=absolute": discounts,
            f"{name} has targets below 0, which critic.value_loss=bce has not: use mse or huber": (
                residual and value_loss == "bce"
            ),
            f"{name} has targets below 0: set critic.value_loss_kwargs.value_min to the least, such as -1": (
                residual and value_loss == "hl_gauss" and isinstance(low, int | float) and low >= 0
            ),
            f"{name} moves values, and the critic learns from outcomes: set algorithm.lam_critic=1"
            + " and algorithm.lam_turn=1" * by_turn: not residual and any(lam != 1.0 for lam in lambdas),
            f"{name} moves values, and algorithm.adv_estimator=vtrace makes the critic's targets of them: use gae, or "
            "critic.target=residual": not residual and algorithm.adv_estimator == "vtrace",
            f"{name} and algorithm.truncated_responses=bootstrap would teach the critic the moved values: drop one": (
                not residual and algorithm.truncation_bootstrap
            ),
            f"{name} needs outcomes, which algorithm.reward_source=critic and algorithm.reward_mask_ratio take away: "
            "use critic.target=absolute": (algorithm.reward_source == "critic" or algorithm.reward_mask_ratio > 0),
        }
        yield from where_true(wrong)

    def refuse(self, batch: Batch) -> None:
        last = [rows[-1] for rows in Episodes(batch).rows]
        alone = sum(len(group) == 1 for group in grouped(last, [batch.objects["uid"][row] for row in last]))
        if alone:
            raise StepRefused(
                f"critic.target={self.config.critic.target} compares samples of one prompt, and {alone} prompts of "
                "this step have one: use critic.target=absolute"
            )

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        episodes = Episodes(batch)
        outcomes = episodes.sums(batch["token_level_rewards"])
        values, mask = batch["values"], batch["response_mask"]
        present = (episodes.sums(mask) > 0).nonzero().flatten()  # the others are rejected
        uid = [batch.objects["uid"][episodes.rows[number][-1]] for number in present.tolist()]
        others = mean_of_others(outcomes[present], uid).float().nan_to_num()
        baseline = torch.zeros_like(outcomes).index_copy_(0, present, others)
        if self.anchored:
            baseline = baseline - values[[rows[0] for rows in episodes.rows], 0]  # its own, also where it is rejected
        baseline = episodes.spread(baseline)
        columns = {OUTPUTS: values, "values": (values + baseline[:, None]) * (mask != 0)}
        if not self.anchored:
            columns[BASELINE] = baseline
        if "bootstrap_values" in self.adds:
            columns["bootstrap_values"] = batch["bootstrap_values"] + baseline
        return Batch(columns), {}
