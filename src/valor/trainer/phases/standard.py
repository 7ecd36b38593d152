"""The list of a training step's phases, in order. A run has those that its configuration wants."""

from collections.abc import Sequence

from valor.config import PPOConfig
from valor.errors import UserError
from valor.trainer.phases.advantages import Advantages
from valor.trainer.phases.base import Phase
from valor.trainer.phases.branches import Branches
from valor.trainer.phases.critic_prompts import CriticPrompts
from valor.trainer.phases.distillation import (
    MovingTeachers,
    SelfTeacherLogProbs,
    ServedTeacherLogProbs,
    TeacherLogProbs,
    TeacherRewards,
    Teachers,
)
from valor.trainer.phases.group_baseline import GroupBaseline
from valor.trainer.phases.measure import BatchMetrics, Samples
from valor.trainer.phases.old_log_probs import (
    OldLogProbMetrics,
    RecomputedLogProbs,
    RolloutCorrection,
    RolloutLogProbs,
)
from valor.trainer.phases.prompt_values import PromptValues
from valor.trainer.phases.reference import ReferenceLogProbs
from valor.trainer.phases.replay import UpdateCriticWithReplay
from valor.trainer.phases.rewards import Rewards
from valor.trainer.phases.training_rows import TrainingRows
from valor.trainer.phases.update_actor import UpdateActor
from valor.trainer.phases.update_critic import UpdateCritic
from valor.trainer.phases.values import Values, ValuesInTheUpdate
from valor.user_files import load_object, unpickled

STANDARD: list[type[Phase]] = [
    Branches,
    CriticPrompts,
    Values,
    RolloutLogProbs,
    RecomputedLogProbs,
    OldLogProbMetrics,
    RolloutCorrection,
    ReferenceLogProbs,
    MovingTeachers,
    Teachers,
    TeacherLogProbs,
    SelfTeacherLogProbs,
    ServedTeacherLogProbs,
    Rewards,
    TeacherRewards,
    ValuesInTheUpdate,
    GroupBaseline,
    Advantages,
    TrainingRows,
    UpdateCritic,
    UpdateCriticWithReplay,
    PromptValues,
    UpdateActor,
    BatchMetrics,
    Samples,
]


def phases_of(config: PPOConfig) -> Sequence[Phase]:
    """The run's phases: of the standard list those that `config` wants, as the user's file changes it.

    `algorithm.phases_path` names a Python file with `phases(standard, config)`, which returns the list to run, or the
    .pkl of such a function that a Python session wrote. UserError: it has no such function, or returns something else.
    """
    standard = [phase(config) for phase in STANDARD if phase.wanted(config)]
    path = config.algorithm.phases_path
    if path is None:
        return standard
    change = unpickled(path) if path.endswith(".pkl") else load_object(f"{path}:phases", "algorithm.phases_path")
    chosen = change(standard, config)
    if not isinstance(chosen, list) or not all(isinstance(phase, Phase) for phase in chosen):
        raise UserError(f"{path}: phases(standard, config) has to return a list of phases, not {type(chosen).__name__}")
    return chosen
