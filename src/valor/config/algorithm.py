"""`algorithm`: advantages, KL control, and what is done to rewards and samples before the update."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.actor import KLKind
from valor.config.base import PathStr, Section, Share, inherits, key, section

_OF_REWARDS = {".reward_source!=critic": "the advantage is V(last) - V"}


class KLControlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant weight, or one that steers the measured KL to target_kl."""
    kl_coef: NonNegativeFloat = 0.001
    """Weight (adaptive: its starting value)."""
    horizon: PositiveInt = key(10000, ".type=adaptive")
    """adaptive: samples over which the weight moves."""
    target_kl: PositiveFloat = key(0.1, ".type=adaptive")
    """adaptive: KL to hold."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: drop prompts whose samples all score the same, and draw others."""

    enable: bool = False
    """Drop and redraw."""
    metric: str | None = None
    """Reward component to compare; acc is the grader's verdict, null the score."""
    max_num_gen_batches: NonNegativeInt = 0
    """Most generation batches per step, after which the run stops; 0 sets no limit."""


class BranchValuesConfig(Section):
    """VinePPO: the mean outcome of rollouts that branch off a response, in place of the critic's value."""

    share: Share = 0.0
    """Share of each response's tokens before which branches start, evenly spaced; 0 draws none."""
    branches: PositiveInt = key(4, ".share")
    """Rollouts from each such state; each is generated to its end, and graded."""


_RATIO_DIFFERS = {".ratio_weighs=false": "with bypass_mode and ppo_clip the ratio is the importance weight already"}


class RolloutCorrectionConfig(Section):
    """The gap between the distribution that generated the samples and the one being trained."""

    rollout_is: Literal["token", "prefix", "sequence"] | None = key(None, _RATIO_DIFFERS)
    """Importance weights of the policy loss: of the token, of all up to it, of the sequence; null uses none."""
    rollout_is_threshold: PositiveFloat | str = key(2.0, ".weighs")
    """Upper bound of the weights, or "low_high" bounds outside of which a weight is 0."""
    rollout_is_batch_normalize: bool = key(False, ".weighs")
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Statistics by which tokens or responses are left out of training, such as token_k1 or seq_mean_k3,seq_max_k2."""
    rollout_rs_threshold: float | str | None = key(None, ".rollout_rs")
    """Their bounds, comma-separated: "low_high" for k1 (on rollout over trained probability), else an upper bound."""
    bypass_mode: bool = False
    """Take the rollout's log-probs as the old ones instead of recomputing them."""
    loss_type: Literal["ppo_clip", "reinforce"] = key("ppo_clip", ".bypass_mode")
    """bypass_mode: actor.policy_loss, whose ratio then is the importance weight; or REINFORCE with rollout_is."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.rollout_rs is not None and self.rollout_rs_threshold is None:
            yield f"{at}rollout_rs={self.rollout_rs} needs {at}rollout_rs_threshold"

    @property
    def ratio_weighs(self) -> bool:
        """Whether the policy loss's ratio is the importance weight already."""
        return self.bypass_mode and self.loss_type == "ppo_clip"

    @property
    def weighs(self) -> bool:
        """Whether importance weights are computed."""
        return self.rollout_is is not None and not self.ratio_weighs


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: str = "gae"
    """Name of a registered advantage estimator: gae, grpo, rloo, ..."""
    custom_path: PathStr | None = None
    """Python file that registers advantage estimators or losses of your own."""
    phases_path: PathStr | None = None
    """Python file with `phases(standard, config)`, which returns the list of phases of each training step."""
    gamma: Share = 1.0
    """Discount per token."""
    lam: Share | Literal["auto"] = key(1.0, _OF_REWARDS)
    """GAE's lambda; auto, for critic.kind=probe: that of the least estimated error of advantages, in each step anew."""
    lam_actor: Share | Literal["auto"] = inherits(".lam", {**_OF_REWARDS, ".adaptive_lam_alpha=null": ""})
    """Lambda of the advantages."""
    lam_critic: Share = inherits(".lam", {**_OF_REWARDS, "critic.kind=model": "a probe learns outcomes: lambda 1"})
    """Lambda of the critic's targets."""
    adaptive_lam_alpha: PositiveFloat | None = key(None, _OF_REWARDS)
    """Lambda of the advantages by response length: 1 - 1 / (alpha * length); null uses lam_actor."""
    gae_unit: Literal["token", "turn", "bilevel"] = key("token", _OF_REWARDS)
    """gae, one step is: a token; a turn, by gamma_turn and lam_turn alone; bilevel: turns, then the tokens in each."""
    gamma_turn: Share = key(1.0, ".gae_unit!=token")
    """turn, bilevel: discount per turn."""
    lam_turn: Share = key(1.0, ".gae_unit!=token")
    """turn, bilevel: lambda between turns."""
    adv_whitening: Literal["batch", "mini_batch", "none"] = "batch"
    """Over which tokens gae, vtrace, evpo, gdpo and reinforce_plus_plus (also _baseline) normalise advantages."""
    truncated_responses: Literal["end", "bootstrap", "exclude"] = "end"
    """Cut at a limit of length or turns: ends with value 0; with the value after it (gae, vtrace, evpo); no loss."""
    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the group's standard deviation (false is Dr. GRPO)."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a prompt's only sample in estimators that compare samples: 0, or its score as in verl."""
    adv_kwargs: dict[str, Any] = key({})
    """Further options of the estimator, such as f_norm; gdpo: reward_keys, reward_weights; or those of your own."""
    reward_source: Literal["rule_based", "critic"] = "rule_based"
    """Where the reward comes from: the score of reward.*, or the critic's value at the last token (A = V(last) - V)."""
    reward_binarize: bool = key(False, ".reward_source!=critic")
    """Replace a score by 1 where it exceeds reward_threshold, else 0 (before penalties for KL and length)."""
    reward_threshold: float = key(0.5, {".reward_source!=critic": "", ".reward_binarize": ""})
    """reward_binarize: the score to exceed."""
    reward_noise: NonNegativeFloat = key(0.0, ".reward_source!=critic")
    """Standard deviation of normal noise added to each outcome in training, for studies of noisy rewards."""
    reward_mask_ratio: Share = 0.0
    """Share of trajectories whose reward is taken away (after the KL penalty, which goes with it)."""
    reward_mask_type: Literal["fixed_ratio", "bernoulli"] = key("fixed_ratio", ".reward_mask_ratio")
    """Exactly that share, fractions carried over the steps; or each trajectory with that probability."""
    reward_mask_level: Literal["trajectory", "group"] = key("trajectory", ".reward_mask_ratio")
    """Draw single trajectories, or all samples of a prompt together."""
    missing_reward: Literal["zero", "bootstrap", "exclude", "critic"] = key("zero", ".reward_mask_ratio")
    """A trajectory without reward: reward 0; V(last) through the estimator; out of the losses; A = V(last) - V."""
    reward_mask_flip_adv_when_masked: bool = key(False, {".reward_mask_ratio": "", ".missing_reward!=exclude": ""})
    """Multiply the advantages of trajectories without reward by -1 (a cure for missing_reward=zero)."""
    branch_values: BranchValuesConfig = section(BranchValuesConfig, ".branch_values.share")
    use_kl_in_reward: bool = False
    """Subtract a KL penalty from each token's reward."""
    kl_penalty: KLKind = key("kl", ".use_kl_in_reward")
    """KL estimator of that penalty; full is the exact divergence, by a pass of the reference beside the actor's."""
    kl_ctrl: KLControlConfig = section(KLControlConfig, ".use_kl_in_reward")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, ".filter_groups.enable")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)

    @property
    def truncation_bootstrap(self) -> bool:
        """Whether a response that was cut off goes on with the value after it."""
        return self.truncated_responses == "bootstrap"

    @property
    def leaves_out_episodes(self) -> bool:
        """Whether some episodes are in no loss: those that were cut off, or those without a reward."""
        return self.truncated_responses == "exclude" or (
            self.reward_mask_ratio > 0 and self.missing_reward == "exclude"
        )

    @property
    def exact_kl_in_reward(self) -> bool:
        """Whether the penalty is the exact KL, which needs no log-probs of the reference."""
        return self.use_kl_in_reward and self.kl_penalty == "full"

    @property
    def flips_masked(self) -> bool:
        """Whether advantages without a reward change their sign."""
        return self.reward_mask_ratio > 0 and self.missing_reward != "exclude" and self.reward_mask_flip_adv_when_masked

    @property
    def reads_end_value(self) -> bool:
        """Whether V(last) takes the place of masked rewards."""
        return self.reward_mask_ratio > 0 and self.missing_reward in ("bootstrap", "critic")
