"""`distillation`: teachers that score what the policy samples, and what their judgement does to its update."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.actor import KLEstimator, RefConfig
from valor.config.base import PathStr, Section, Share, key, section
from valor.config.engine import RefFSDPConfig

DivergenceMode = Literal[
    "forward_kl", "reverse_kl", "jsd", "forward_kl_topk", "reverse_kl_topk", "jsd_topk"
]  # of whole distributions
_TOPK = ".loss_mode=forward_kl_topk or .loss_mode=reverse_kl_topk or .loss_mode=jsd_topk"


class DistillationLossConfig(Section):
    """How far the policy is from its teacher at a token, and how that becomes part of the update."""

    loss_mode: KLEstimator | DivergenceMode = "k3"
    """Estimator of the reverse KL from sampled tokens; or divergence of whole distributions (*_topk: some tokens)."""
    beta: Share = key(0.5, ".loss_mode=jsd or .loss_mode=jsd_topk")
    """jsd: weight of the teacher's half, and of the teacher in the mixture (0 forward KL, 1 reverse KL)."""
    topk: PositiveInt = key(32, _TOPK)
    """*_topk: tokens of each position, those that the teacher finds likeliest."""
    add_tail: bool = key(True, _TOPK)
    """*_topk: all other tokens are one more; false leaves them out, as verl does."""
    use_task_rewards: bool = True
    """Also learn from the task's reward; false: from the teacher alone."""
    distillation_loss_coef: NonNegativeFloat = key(1.0, ".use_task_rewards")
    """Weight of the teacher beside the task's reward."""
    distillation_loss_coef_decay_steps: PositiveInt | None = key(None, ".use_task_rewards")
    """Steps over which that weight falls to 0, linearly; null: it stays."""
    loss_max_clamp: PositiveFloat | None = None
    """Largest size of a token's divergence; null sets no limit."""
    log_prob_min_clamp: float | None = None
    """Log-probs below this one count as it in the divergence; null: as they are."""
    use_policy_gradient: bool = False
    """The negative divergence of a sampled token is a signal of the policy loss; false: its gradient is the loss's."""
    signal: Literal["advantage", "reward"] = key("advantage", ".use_policy_gradient")
    """The signal is added to the token's advantage, or to its reward, from which adv_estimator makes advantages."""

    @property
    def of_distributions(self) -> bool:
        """Whether the divergence is that of whole distributions."""
        return self.loss_mode.startswith(("forward_kl", "reverse_kl", "jsd"))

    def contradictions(self, at: str) -> Iterator[str]:
        if self.log_prob_min_clamp is not None and self.log_prob_min_clamp >= 0:
            yield f"{at}log_prob_min_clamp={self.log_prob_min_clamp:g}: log-probs are below 0, set such as -10"
        mode = f"{at}loss_mode={self.loss_mode}"
        if self.use_policy_gradient and self.of_distributions:
            yield (
                f"{mode} is about every token, and {at}use_policy_gradient=true about the sampled one: set "
                "use_policy_gradient=false, or loss_mode=k1"
            )
        if not self.use_policy_gradient and self.loss_mode in ("kl", "k1"):
            yield (
                f"{mode} has a gradient that knows nothing of the teacher: set {at}use_policy_gradient=true, or "
                "loss_mode=k2 or k3"
            )


class TeacherConfig(Section):
    """A teacher, which reads the policy's tokens."""

    model_path: PathStr | None = None
    """Hugging Face hub id or local directory, of the policy's tokenizer; null: the policy, as it is before the step."""
    url: str | None = None
    """OpenAI-compatible server of such a model (vLLM, SGLang): http://HOST:8000/v1; model_path: its name there."""
    prompt_template: str | None = None
    """What it reads in place of the last message: a text with {prompt} and columns such as {ground_truth} in it."""
    temperature: PositiveFloat | None = None
    """Temperature of its distribution; null is that of the rollout."""
    trust_remote_code: bool = False
    """Run Python code that the model directory brings along."""
    override_config: dict[str, Any] = key({})
    """Attributes of its Hugging Face config to replace."""
    key: str | None = None
    """The rows that are this teacher's, by their value of teacher_key; null, for one alone: all rows."""
    update_rate: Share | None = None
    """Its weights move this share of the way to the policy's in each step (moving average); null: they stay."""


class DistillationConfig(RefConfig, fsdp_config=section(RefFSDPConfig)):
    """On-policy distillation: the policy learns from teachers that score each of its tokens."""

    enabled: bool = False
    """Learn from teachers."""
    teacher_models: dict[str, TeacherConfig] = key({})
    """Teachers by names of yours: {math: {key: openai/gsm8k, model_path: DIR}}; one alone needs no key."""
    teacher_key: str = "data_source"
    """Several teachers: data_source, or the entry of a row's extra_info, that says which one a row has."""
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)
    nnodes: NonNegativeInt = 0
    """Nodes of a pool for the teachers; 0: they live in the actor's processes."""
    n_gpus_per_node: PositiveInt = key(8, ".nnodes")
    """Devices per node of that pool."""

    def contradictions(self, at: str) -> Iterator[str]:
        teachers, loss = self.teacher_models, self.distillation_loss
        if not teachers:
            yield f"{at}enabled=true has no teacher: set {at}teacher_models.teacher_model.model_path"
        for name, teacher in teachers.items():
            this, template = f"{at}teacher_models.{name}", teacher.prompt_template
            if teacher.model_path is None and teacher.url is None and template is None:
                yield f"{this} has no model: set {this}.model_path, or {this}.prompt_template for the policy to read"
            if teacher.url is not None and loss.of_distributions:
                yield f"{this}.url: a server scores sampled tokens: set {at}distillation_loss.loss_mode=k3"
            if teacher.url is not None and (teacher.override_config or teacher.trust_remote_code):
                yield f"{this}.url: the server has loaded its model: drop override_config and trust_remote_code"
            if teacher.update_rate is not None and name not in self.models:
                yield f"{this}.update_rate moves weights that this run loads: set {this}.model_path, without a url"
            if template is not None and "{prompt}" not in template:
                yield f"{this}.prompt_template has no {{prompt}} in it: the teacher would not see the question"
            if template is not None and loss.of_distributions:
                mode = f"{at}distillation_loss.loss_mode"
                yield f"{this}.prompt_template is for sampled tokens: set {mode} to an estimator such as k3"
            if len(teachers) > 1 and teacher.key is None:
                yield f"{at}teacher_models.{name}.key is not set: say which rows ({at}teacher_key) are this teacher's"
        if any(0 < len(part) < len(teachers) for part in (self.models, self.served)):
            yield (f"{at}teacher_models: some are models here, some behind a url, some the policy: make all the same")
        for value, count in Counter(teacher.key for teacher in teachers.values()).items():
            if count > 1 and value is not None:
                yield f"{at}teacher_models: {count} teachers have the key '{value}': give each rows of its own"

    @property
    def routes(self) -> bool:
        """Whether the rows are shared out by their values of `teacher_key`."""
        return any(teacher.key is not None for teacher in self.teacher_models.values())

    @property
    def models(self) -> dict[str, TeacherConfig]:
        """The teachers that this run loads."""
        teachers = self.teacher_models.items()
        return {name: teacher for name, teacher in teachers if teacher.model_path is not None and teacher.url is None}

    @property
    def served(self) -> dict[str, TeacherConfig]:
        """The teachers behind servers."""
        return {name: teacher for name, teacher in self.teacher_models.items() if teacher.url is not None}

    @property
    def of_distributions(self) -> bool:
        """Whether the actor's passes read the teachers' whole distributions."""
        return self.enabled and self.distillation_loss.of_distributions

    @property
    def of_samples(self) -> bool:
        """Whether teachers give log-probs of the sampled tokens."""
        return self.enabled and not self.distillation_loss.of_distributions

    @property
    def as_reward(self) -> bool:
        """Whether the teachers' signal is a reward of each token."""
        return self.enabled and self.distillation_loss.use_policy_gradient and self.distillation_loss.signal == "reward"

    @property
    def as_advantage(self) -> bool:
        """Whether it is added to advantages."""
        return self.enabled and self.distillation_loss.use_policy_gradient and not self.as_reward

    @property
    def alone(self) -> bool:
        """Whether the task's reward is not learnt from."""
        return self.enabled and not self.distillation_loss.use_task_rewards

    @property
    def replaces_advantages(self) -> bool:
        """Whether what `algorithm.adv_estimator` computes is not learnt from."""
        return self.alone and not self.as_reward

    @property
    def moves(self) -> bool:
        """Whether a teacher follows the policy."""
        return self.enabled and any(teacher.update_rate is not None for teacher in self.models.values())

    def coefficient(self, step: int) -> float:
        """Weight of the teacher's signal in a step; the first is 1."""
        loss = self.distillation_loss
        if not loss.use_task_rewards:
            return 1.0
        steps = loss.distillation_loss_coef_decay_steps
        return loss.distillation_loss_coef * (1.0 if steps is None else max(0.0, 1.0 - (step - 1) / steps))
