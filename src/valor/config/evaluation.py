"""The tree that `valor eval` reads: of a PPO run what says how a policy answers and is graded, and `eval`."""

from collections.abc import Iterator
from typing import ClassVar

from valor.config.base import FolderStr, PathList, Section, section
from valor.config.ppo import PPOConfig

_TRAINING = """
    actor_rollout_ref.actor.* !actor_rollout_ref.actor.fsdp_config.* actor_rollout_ref.ref.* algorithm.* critic.*
    distillation.* global_profiler.* resource_pools* reward.reward_kwargs.* actor_rollout_ref.rollout.n
    actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_? actor_rollout_ref.rollout.do_sample
    actor_rollout_ref.rollout.log_prob_* actor_rollout_ref.rollout.nnodes actor_rollout_ref.rollout.agent.replay_dir
    data.train_* data.gen_batch_size data.shuffle data.sampler.*
    trainer.default_local_dir trainer.total_* trainer.save_freq trainer.resume_* trainer.max_* trainer.logger
    trainer.report trainer.*_name trainer.critic_warmup trainer.val_* trainer.test_freq trainer.keep_best
    trainer.log_* trainer.*_data_dir trainer.rollout_probs_diff_warn trainer.v1.*
"""


class EvalConfigSection(Section):
    """Which policies are measured, and where to."""

    out: FolderStr = "evaluation"
    """Folder for eval.json, eval.md, eval.html and the answers; the same command goes on where it was stopped."""
    others: PathList | None = None
    """Further policies on the same prompts, each compared with that of actor_rollout_ref.model.path."""


class EvalConfig(PPOConfig):
    """Answers of policies to prompts, graded: rollout.val_kwargs says how many, and how they are drawn."""

    trains_policy: ClassVar[bool] = False
    eval: EvalConfigSection = section(EvalConfigSection)

    @property
    def has_value_model(self) -> bool:
        return False

    def unused(self) -> dict[str, str]:
        return super().unused() | {"nothing is trained here": _TRAINING}

    def contradictions(self, at: str) -> Iterator[str]:
        yield from self._lengths()
        yield from self._cluster()
        yield from self._images()
        if self.data.val_files is None:
            yield "there is nothing to answer: set data.val_files"
        sampling = self.actor_rollout_ref.rollout.val_kwargs
        if sampling.n > 1 and sampling.effective_temperature == 0:
            yield (
                f"actor_rollout_ref.rollout.val_kwargs.n={sampling.n} greedy answers are the same: set "
                "actor_rollout_ref.rollout.val_kwargs.temperature"
            )
