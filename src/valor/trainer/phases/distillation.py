"""Teachers: whose a row is, the log-probs that they give the sampled tokens, and what these are worth as rewards."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from valor import algorithms
from valor.algorithms import ADVANTAGES
from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.config.distillation import DistillationConfig, TeacherConfig
from valor.data.batch import Batch
from valor.data.prompts import render, token_ids
from valor.errors import StepRefused, UserError
from valor.models.rows import ROW_FIELDS
from valor.tracking.progress import phase
from valor.trainer.phases.base import Metrics, Phase, where_true
from valor.trainer.prompt_templates import COLUMNS, check_longest, columns_of, filled, reading_more
from valor.trainer.served_teacher import served_log_probs
from valor.workers.actor import sampled_options
from valor.workers.roles import teacher_names
from valor.workers.teacher import check_teachers, teacher_model

TEACHER = "teacher"  # column [B]: number of each row's teacher
TEMPLATE = "distillation.teacher_models.<name>.prompt_template"


class Teachers(Phase):
    """Which teacher each row has, and what the step's update cannot be combined with."""

    name = "teachers"
    timer = "teacher"
    reads = frozenset(COLUMNS)
    adds = frozenset((TEACHER,))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.distillation.enabled

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        teach, algorithm, actor = config.distillation, config.algorithm, config.actor_rollout_ref.actor
        mode = f"distillation.distillation_loss.loss_mode={teach.distillation_loss.loss_mode}"
        as_reward = "distillation.distillation_loss.signal=reward"
        estimator = f"algorithm.adv_estimator={algorithm.adv_estimator}"
        staged = actor.strategy == "megatron" and actor.megatron.pipeline_model_parallel_size > 1
        pooled = any("teacher" in pool.roles for pool in config.pools.values())
        wrong = {
            f"{mode} compares whole distributions, and so does actor_rollout_ref.actor.kl_loss_type=full: set that to "
            "an estimator such as k3": teach.of_distributions and actor.exact_kl_loss,
            f"{mode} compares whole distributions, which pipeline stages do not have: set "
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1, or an estimator such as "
            "k3": teach.of_distributions and staged,
            f"{mode} compares whole distributions, beside the actor: set distillation.nnodes=0, or an estimator such "
            "as loss_mode=k3": teach.of_distributions and pooled,
            f"the critic of {estimator} would learn for nothing, as "
            f"distillation.distillation_loss.use_task_rewards=false leaves its advantages out: set {as_reward} with "
            "use_policy_gradient=true, or algorithm.adv_estimator=grpo": teach.replaces_advantages
            and config.critic.enable,
            "algorithm.use_kl_in_reward changes rewards, and distillation.distillation_loss.use_task_rewards=false "
            f"learns from none: set actor_rollout_ref.actor.use_kl_loss=true instead, or {as_reward} with "
            "use_policy_gradient=true": teach.replaces_advantages and algorithm.use_kl_in_reward,
            f"{TEMPLATE} is for answers of one turn, and here episodes are played: drop it": config.plays_episodes
            and any(teacher.prompt_template is not None for teacher in teach.teacher_models.values()),
            "distillation.teacher_models.<name>.url: a server scores at temperature 1: set "
            "actor_rollout_ref.rollout.temperature=1, or the teacher's": any(
                (teacher.temperature or config.actor_rollout_ref.rollout.temperature) != 1.0
                for teacher in teach.served.values()
            ),
            f"{as_reward} is a reward that {estimator} does not read, which compares reward components: set "
            "signal=advantage": teach.as_reward and ADVANTAGES[algorithm.adv_estimator].capability.needs_components,
            f"{as_reward}: algorithm.reward_source=critic has no other reward: set signal=advantage": (
                teach.as_reward and algorithm.reward_source == "critic"
            ),
            f"{as_reward}: algorithm.reward_mask_ratio takes rewards away, but not the teacher's: set "
            "signal=advantage": teach.as_reward and algorithm.reward_mask_ratio > 0,
        }
        yield from where_true(wrong)

    def plan(self) -> str:
        teach = self.config.distillation
        loss = teach.distillation_loss
        teachers = teach.teacher_models.items()
        names = ", ".join(f"{name} ({each.url or each.model_path or 'the policy'})" for name, each in teachers)
        by = f" by {teach.teacher_key}" if teach.routes else ""
        form = f"each token's {loss.signal}" if loss.use_policy_gradient else "a loss"
        decay = loss.distillation_loss_coef_decay_steps
        falling = f", falling to 0 over {decay} steps" if decay else ""
        beside = f"{teach.coefficient(1):g} x beside the task's reward{falling}" if loss.use_task_rewards else "alone"
        return f"{names}{by}; {loss.loss_mode} is {form}, {beside}"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Metrics: `distillation/coefficient`, the teachers' weight beside the task, where it falls."""
        teach = self.config.distillation
        falls = teach.distillation_loss.distillation_loss_coef_decay_steps is not None
        metrics = {"distillation/coefficient": teach.coefficient(step)} if falls else {}
        try:
            numbers = [_number(teach, *row) for row in zip(*map(batch.objects.get, COLUMNS), strict=True)]
        except UserError as error:
            raise StepRefused(str(error)) from error
        return Batch({TEACHER: torch.tensor(numbers)}), metrics


class MovingTeachers(Phase):
    """Teachers with an `update_rate` move towards the policy, as the last step has left it."""

    name = "moving_teachers"
    timer = "teacher"
    role = "teacher"

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.distillation.moves

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        at, policy = "distillation.teacher_models.<name>.update_rate", config.actor_rollout_ref
        wrong = {
            f"{at} needs the policy in the same processes: drop distillation.nnodes": any(
                "teacher" in pool.roles for pool in config.pools.values()
            ),
            f"{at} follows all weights of a policy, and here adapters are trained: set "
            "actor_rollout_ref.model.lora_rank=0": policy.model.lora_rank > 0,
            f"{at} is not for megatron: set actor_rollout_ref.actor.strategy=fsdp2": policy.actor.strategy
            == "megatron",
            f"{at}: bfloat16 weights would round small moves away: set "
            "distillation.fsdp_config.model_dtype=float32": config.distillation.fsdp_config.model_dtype != "float32",
        }
        yield from where_true(wrong)

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        teachers = self.config.distillation.teacher_models.values()
        for role, teacher in zip(teacher_names(self.config), teachers, strict=True):
            if teacher.update_rate is not None:
                self.resources.roles[role].follow(teacher.update_rate)
        return Batch(), {}


class TeacherLogProbs(Phase):
    """One pass of its teacher over each row."""

    name = "teacher"
    role = "teacher"
    reads = frozenset((*ROW_FIELDS, TEACHER, "response_mask", "rollout_log_probs", *COLUMNS))
    reads_if_there = frozenset(("episode", "messages", "template_kwargs"))
    adds = frozenset(("teacher_log_probs",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.distillation.of_samples and bool(config.distillation.models)

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Metrics: `distillation/reverse_kl`, the mean of log π − log ν over policy tokens; of several teachers also
        `distillation/reverse_kl/<name>`."""
        teach, number = self.config.distillation, batch[TEACHER]
        log_probs, metrics = torch.zeros(batch["responses"].shape), Metrics()
        with phase("teacher log-probs", len(batch), unit="sample"):
            for index, (name, role) in enumerate(zip(teach.teacher_models, teacher_names(self.config), strict=True)):
                rows = (number == index).nonzero()[:, 0]
                if len(rows):
                    log_probs[rows] = self._scored(batch.take(rows), role, teach.teacher_models[name])
                    if len(teach.teacher_models) > 1:
                        metrics |= self._gap(f"/{name}", batch.take(rows), log_probs[rows])
        return Batch({"teacher_log_probs": log_probs}), metrics | self._gap("", batch, log_probs)

    def _scored(self, rows: Batch, role: str, teacher: TeacherConfig) -> Tensor:
        """[B, T] log-probs that a teacher gives the rows' responses."""
        if teacher.prompt_template is not None:
            tokenizer, options = self.resources.collector.inputs.tokenizer, self.config.data.apply_chat_template_kwargs
            rows = rows.union(reading_more(rows, teacher.prompt_template, TEMPLATE, tokenizer, options))
        rows.meta["temperature"] = teacher.temperature or rows.meta["temperature"]
        return self._log_probs(rows, role, teacher)

    def _log_probs(self, rows: Batch, role: str, teacher: TeacherConfig) -> Tensor:
        return self.resources.roles[role].compute_log_probs(rows)["teacher_log_probs"]

    def _gap(self, of: str, batch: Batch, log_probs: Tensor) -> Metrics:
        mask = batch["response_mask"]
        gap = algorithms.log_ratio(batch["rollout_log_probs"], log_probs)
        return {f"distillation/reverse_kl{of}": float(algorithms.masked_mean(gap, mask))}


class SelfTeacherLogProbs(TeacherLogProbs):
    """One pass of the policy itself, which reads more than it did when it answered."""

    role = "actor"

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        teach = config.distillation
        return teach.of_samples and not teach.models and not teach.served

    def _log_probs(self, rows: Batch, role: str, teacher: TeacherConfig) -> Tensor:
        return self.resources.roles[role].compute_log_probs(rows, with_entropy=False)["old_log_probs"]


class ServedTeacherLogProbs(TeacherLogProbs):
    """One request for each row to the server of its teacher."""

    role = None

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.distillation.of_samples and bool(config.distillation.served)

    def _log_probs(self, rows: Batch, role: str, teacher: TeacherConfig) -> Tensor:
        return served_log_probs(teacher, rows)


class TeacherRewards(Phase):
    """The teacher's judgement of each token as its reward, beside the task's or alone."""

    name = "teacher_rewards"
    timer = "adv"
    reads = frozenset(("response_mask", "token_level_rewards", "old_log_probs", "teacher_log_probs"))
    reads_if_there = frozenset(("episode",))
    adds = frozenset(("token_level_rewards",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.distillation.as_reward

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        teach = self.config.distillation
        gap = algorithms.sampled_divergence(
            batch["old_log_probs"], batch["teacher_log_probs"], **sampled_options(teach.distillation_loss)
        )
        rewards = -teach.coefficient(step) * algorithms.keep_masked(gap, batch["response_mask"])
        if teach.distillation_loss.use_task_rewards:
            rewards = rewards + batch["token_level_rewards"]
        return Batch({"token_level_rewards": rewards}), {}


def check_routes(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: a teacher that the policy cannot learn from, or a row of the training prompts without a teacher, or
    without a column that its teacher is told, or with more of it than that has positions."""
    section, tokenizer = config.distillation, inputs.tokenizer
    if not section.enabled:
        return
    check_teachers(config, tokenizer)
    teachers = [*section.teacher_models.values()]
    longest = [0] * len(teachers)
    for row in inputs.train if section.routes or teachers[0].prompt_template is not None else ():
        values = (row.data_source, row.ground_truth, row.extra_info)
        number = _number(section, *values)
        if (template := teachers[number].prompt_template) is not None:
            messages = filled(template, TEMPLATE, row.messages, columns_of(*values))
            text = render(tokenizer, messages, row.template_kwargs)
            longest[number] = max(longest[number], len(token_ids(tokenizer, [text])[0]))
    for teacher, prompt in zip(teachers, longest, strict=True):
        if prompt and teacher.url is None:
            model = config.actor_rollout_ref.model
            model = model if teacher.model_path is None else teacher_model(config, teacher)
            check_longest(TEMPLATE, prompt, config.data.max_response_length, model)


def _number(config: DistillationConfig, data_source: str, _: Any, extra_info: Mapping[str, Any]) -> int:
    if not config.routes:
        return 0
    key = data_source if config.teacher_key == "data_source" else str(extra_info.get(config.teacher_key))
    keys = [str(teacher.key) for teacher in config.teacher_models.values()]
    if config.teacher_key not in ("data_source", *extra_info):
        raise UserError(
            f"a row has no '{config.teacher_key}' in extra_info, where distillation.teacher_key is looked up"
        )
    if key not in keys:
        raise UserError(
            f"a row has {config.teacher_key}={key}, and no teacher has that key (they have {', '.join(keys)}): set "
            "distillation.teacher_models.<name>.key"
        )
    return keys.index(key)
