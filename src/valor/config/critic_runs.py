"""The trees that `valor critic pretrain`, `score` and `search` read: a PPO run's, and one section more."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from valor.config.base import FolderStr, PathList, Section, key, section
from valor.config.ppo import PPOConfig
from valor.config.trainer import TrainerConfig

_ONE_CRITIC = (
    "critic.ensemble_size={}: one critic is asked here: set critic.ensemble_size=1, and critic.model.path to a member"
)
_POLICY_UPDATE = """
    actor_rollout_ref.actor.optim.* actor_rollout_ref.actor.p*loss.* actor_rollout_ref.actor.clip_*
    actor_rollout_ref.actor.*entropy* actor_rollout_ref.actor.*kl_* actor_rollout_ref.actor.positive*
    actor_rollout_ref.ref.* actor_rollout_ref.rollout.val_kwargs.* actor_rollout_ref.rollout.log_prob_*
    actor_rollout_ref.rollout.agent.replay_dir data.gen_batch_size data.sampler.*
    algorithm.* !algorithm.gamma !algorithm.custom_path !algorithm.reward_[bt]*
    trainer.critic_warmup trainer.val_* trainer.test_freq trainer.keep_best trainer.log_* trainer.*_data_dir
    trainer.rollout_probs_diff_warn
"""
_CRITIC_UPDATE = """
    critic.optim.* critic.freeze* critic.value_loss* critic.cliprange_value critic.unclipped_steps
    critic.ppo_epochs critic.ppo_mini* critic.shuffle data.train_* data.shuffle
    trainer.default_local_dir trainer.total_* trainer.save_freq trainer.resume_* trainer.max_* trainer.logger
    trainer.report trainer.*_name
"""


class PretrainConfig(Section):
    """What the critic learns from, and on what it is judged."""

    rollouts: PathList | None = None
    """Files or folders with rollouts (jsonl); null has the policy give rollout.n answers to each training prompt."""
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the prompts that is kept back; the epoch that explains their returns best is exported."""


class PretrainTrainerConfig(TrainerConfig, experiment_name="critic", total_epochs=4):
    """The pre-training run; a step is one batch of prompts with all their rollouts."""


class CriticRunConfig(PPOConfig):
    """A run that is about a critic, whatever algorithm.adv_estimator says."""

    trains_policy: ClassVar[bool] = False

    def unused(self) -> dict[str, str]:
        pools = "resource_pools* actor_rollout_ref.rollout.nnodes trainer.v1.*"
        return super().unused() | {
            "the policy is not trained here, and returns are outcomes (lambda 1)": _POLICY_UPDATE,
            "steps of a PPO run alone are traced": "global_profiler.*",
            "policy and critic take turns on all processes of trainer.*": pools,
            "samples are repeated by trainer.total_epochs here": "critic.replay_steps",
        }

    def contradictions(self, at: str) -> Iterator[str]:
        yield from self._lengths()
        yield from self._cluster()
        if self.data.image_key is not None:
            yield f"data.image_key={self.data.image_key}: this command reads text, images are for valor ppo: drop it"
        if not self.critic.enable:
            yield "critic.enable=false leaves nothing to do here: leave it at true"
        if self.critic.kind == "probe":
            yield "critic.kind=probe is fitted in a run of valor ppo, and is no model: leave it at model"
        if (target := self.critic.target) != "absolute":
            yield f"critic.target={target} compares samples of one prompt, and outcomes judge critics here: drop it"
        if self.critic.prompt_template is not None:
            yield "critic.prompt_template is for valor ppo, and this command shows critics the prompts alone: drop it"
        if self.reward.reward_model.enable and self.reward.reward_model.gives != "outcome":
            gives = self.reward.reward_model.gives
            yield f"reward.reward_model.gives={gives} is for advantages, and returns here are outcomes: use outcome"


class CriticPretrainConfig(CriticRunConfig):
    """One run that fits a critic to the outcomes of rollouts, with the policy as it is."""

    pretrain: PretrainConfig = section(PretrainConfig)
    trainer: PretrainTrainerConfig = section(PretrainTrainerConfig)

    @property
    def generator(self) -> str | None:
        return super().generator if self.pretrain.rollouts is None else None

    def unused(self) -> dict[str, str]:
        held_out = {"pretrain.holdout keeps prompts back": "data.val_*"}
        files = {} if self.pretrain.rollouts is None else {"pretrain.rollouts is what is read": "data.train_[fm]*"}
        return super().unused() | held_out | files

    def contradictions(self, at: str) -> Iterator[str]:
        yield from super().contradictions(at)
        yield from self._batches()
        if self.critic.freeze or self.critic.freeze_steps:
            yield "critic.freeze and critic.freeze_steps hold the critic still, and here it is to learn: drop them"


class ScoreConfig(Section):
    """On what a critic is judged."""

    out: FolderStr = "scorecard"
    """Folder for scorecard.json, scorecard.html and the rollouts."""
    rollouts: PathList | None = None
    """Files or folders with rollouts (jsonl); null has the policy give rollout.n answers to each validation prompt."""
    mc: NonNegativeInt = 0
    """Branch rollouts from before and behind each chosen token, whose mean outcomes are the true values. 0: none."""
    positions: Annotated[int, Field(ge=2)] = 5
    """Positions of a response from which branches start, evenly spaced from its first token to its last."""
    responses: PositiveInt = 64
    """Responses that get branches."""


class CriticScoreConfig(CriticRunConfig):
    """One scorecard of a critic."""

    score: ScoreConfig = section(ScoreConfig)

    @property
    def generator(self) -> str | None:
        return super().generator if self.score.rollouts is None else None

    def unused(self) -> dict[str, str]:
        return super().unused() | {"nothing is trained here": _CRITIC_UPDATE}

    def contradictions(self, at: str) -> Iterator[str]:
        yield from super().contradictions(at)
        if self.critic.ensemble_size > 1:
            yield _ONE_CRITIC.format(self.critic.ensemble_size)
        if self.score.rollouts is None and self.data.val_files is None:
            yield "a critic is scored on prompts that it has not seen: set data.val_files, or score.rollouts"
        if self.score.rollouts is not None and self.score.mc:
            yield "score.mc branches off answers of the policy itself: set data.val_files, not score.rollouts"


class SearchConfig(Section):
    """Among how many answers the critic chooses."""

    out: FolderStr = "search"
    """Folder for search.json and search.md."""
    samples: Annotated[list[PositiveInt], Field(min_length=1)] = key([1, 4, 16])
    """N: answers from which one is chosen."""


class CriticSearchConfig(CriticRunConfig):
    """Answers to held-out prompts, among which a critic chooses."""

    search: SearchConfig = section(SearchConfig)

    def unused(self) -> dict[str, str]:
        more = {"nothing is trained here": _CRITIC_UPDATE, "search.samples says it": "actor_rollout_ref.rollout.n"}
        return super().unused() | more

    def contradictions(self, at: str) -> Iterator[str]:
        yield from super().contradictions(at)
        if self.critic.ensemble_size > 1:
            yield _ONE_CRITIC.format(self.critic.ensemble_size)
        if self.data.val_files is None:
            yield "search answers held-out prompts: set data.val_files"
        if self.plays_episodes:
            yield "search chooses among single answers: drop the keys of agents"
        if self.reward.reward_model.enable:
            yield "search compares answers by rule: set reward.reward_model.enable=false"


def held_out(config: PPOConfig) -> PPOConfig:
    """The tree of a run that answers its validation prompts as training prompts are answered."""
    data = config.data
    files = {"train_files": data.val_files, "train_max_samples": data.val_max_samples, "val_files": None}
    return config.model_copy(update={"data": data.model_copy(update={**files, "train_batch_size": 1})})
