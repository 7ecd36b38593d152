"""The root of the tree that `valor ppo` reads."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import PositiveInt, model_validator

from valor.config.actor import ActorConfig, CriticConfig, RefConfig, UpdateConfig
from valor.config.algorithm import AlgorithmConfig
from valor.config.base import Section, key, section
from valor.config.data import DataConfig
from valor.config.distillation import DistillationConfig
from valor.config.engine import GlobalProfilerConfig, ModelConfig
from valor.config.inheritance import MAIN_TREE, fill_inherited, lookup
from valor.config.reward import RewardConfig
from valor.config.rollout import RetrieverConfig, RolloutConfig
from valor.config.trainer import PoolConfig, RayKwargsConfig, TrainerConfig
from valor.config.tree import get_at, set_at

CRITIC_BY_DEFAULT = ("gae", "vtrace", "evpo")
"""The estimators with which critic.enable is true where it is not set; the first is the default."""
SINGLE_TURN = "single_turn_agent"
MAX_LENGTH = "actor_rollout_ref.rollout.max_model_len"
ROLLOUT_NODES = "actor_rollout_ref.rollout.nnodes"


class ActorRolloutRefConfig(Section):
    """The policy in its three uses."""

    model: ModelConfig = section(ModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig, {"needs_reference": "nothing reads it: no KL term is on, and no probe"})
    rollout: RolloutConfig = section(RolloutConfig)


class PPOConfig(Section):
    """One run of PPO, GRPO or a relative of theirs."""

    trains_policy: ClassVar[bool] = True
    """Whether the policy is updated; a run that is about a critic alone has one whatever the estimator."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig, {"critic.enable": "this run has no critic"})
    data: DataConfig = section(DataConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    distillation: DistillationConfig = section(DistillationConfig, "distillation.enabled")
    trainer: TrainerConfig = section(TrainerConfig)
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)
    do_search: bool = False
    """Let the policy search, as in Search-R1: <search>query</search>, and an answer in <answer>."""
    max_turns: PositiveInt = key(10, "do_search")
    """Most searches in an episode; after them comes one last turn."""
    retriever: RetrieverConfig = section(RetrieverConfig)
    resource_pools: dict[str, PoolConfig] = key({})
    """Processes of their own for some roles, by a name of yours: {values: {roles: critic, n_gpus_per_node: 2}}."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        tree = fill_inherited(cls, data)
        if get_at(tree, "critic.enable") is None:
            estimator = get_at(tree, "algorithm.adv_estimator") or CRITIC_BY_DEFAULT[0]
            set_at(tree, "critic.enable", not cls.trains_policy or estimator in CRITIC_BY_DEFAULT)
        if get_at(tree, "critic.kind") == "probe" or get_at(tree, "algorithm.lam") == "auto":
            set_at(tree, "algorithm.lam_critic", 1.0)
        if get_at(tree, "trainer.v1.trainer_mode") == "separate_async" and not get_at(tree, "resource_pools"):
            set_at(tree, ROLLOUT_NODES, get_at(tree, ROLLOUT_NODES) or 1)
        for name in ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"):
            set_at(tree, name, lookup(cls, tree, name))
        if get_at(tree, MAX_LENGTH) is None:
            parts = [lookup(cls, tree, f"data.max_{part}_length") for part in ("prompt", "response")]
            if all(isinstance(part, int) for part in parts):  # what is no number is told where it was set
                set_at(tree, MAX_LENGTH, sum(parts))
        return tree

    @property
    def generator(self) -> str | None:
        """Name of the engine by which the policy answers prompts; None where it answers none."""
        return self.actor_rollout_ref.rollout.name

    @property
    def default_agent_loop(self) -> str:
        """The loop of rows that name none."""
        return self.actor_rollout_ref.rollout.agent.default_agent_loop or next(iter(self._loops), SINGLE_TURN)

    @property
    def _loops(self) -> dict[str, str]:
        """The loops that keys switch on, each with the setting that does."""
        rollout = self.actor_rollout_ref.rollout
        environment = None if rollout.multi_turn.enable else rollout.agent.environment or self.data.taskset
        settings = {
            "environment_agent": environment and f"the environment {environment}",
            "tool_agent": rollout.multi_turn.enable and "actor_rollout_ref.rollout.multi_turn.enable=true",
            "search_agent": self.do_search and "do_search=true",
        }
        return {loop: setting for loop, setting in settings.items() if setting}

    @property
    def plays_episodes(self) -> bool:
        """Whether a row may have more than one turn."""
        loops = self.actor_rollout_ref.rollout.agent.agent_loop_config_path
        return self.default_agent_loop != SINGLE_TURN or loops is not None

    @property
    def start_length(self) -> int:
        """Longest first prompt in tokens."""
        return (self.do_search and self.data.max_start_length) or self.data.max_prompt_length

    @property
    def episode_length(self) -> int:
        """Most tokens after the prompt of a row, the policy's and those it is shown. Search-R1 counts
        data.max_response_length for each turn, and data.max_prompt_length for all before the last."""
        return self.data.max_prompt_length - self.start_length + self.data.max_response_length

    def contradictions(self, at: str) -> Iterator[str]:
        """Contradictions between sections; those of a phase of the step are in the phase."""
        for check in (
            self._lengths,
            self._batches,
            self._asynchronous,
            self._reward_steps,
            self._cluster,
            self._images,
        ):
            yield from check()
        for name in ("val_only", "keep_best"):
            if getattr(self.trainer, name) and not self.data.has_validation:
                yield f"trainer.{name}=true needs validation prompts: set data.val_files"
        environment = self.actor_rollout_ref.rollout.agent.environment
        if self.data.taskset is not None and environment is not None:
            other = f"actor_rollout_ref.rollout.agent.environment={environment}"
            yield f"data.taskset={self.data.taskset} and {other} both play the episodes: drop one"
        if len(self._loops) > 1 and self.actor_rollout_ref.rollout.agent.default_agent_loop is None:
            both, loops = " and ".join(self._loops.values()), " or ".join(self._loops)
            yield f"{both} are different loops: set actor_rollout_ref.rollout.agent.default_agent_loop to {loops}"

    def _reward_steps(self) -> Iterator[str]:
        """What a reward model that reads tokens does not go with."""
        model, algorithm = self.reward.reward_model, self.algorithm
        gives = f"reward.reward_model.gives={model.gives}"
        if not model.enable or model.gives == "outcome":
            return
        if self.plays_episodes:
            yield f"{gives} reads answers of one turn, and here episodes are played: use gives=outcome"
        if algorithm.reward_binarize and model.gives == "steps":
            yield f"{gives} gives rewards along the answer, algorithm.reward_binarize one at its end: drop one of them"
        if not model.scores and (algorithm.reward_mask_ratio > 0 or algorithm.reward_source == "critic"):
            other = "reward_source=critic" if algorithm.reward_source == "critic" else "reward_mask_ratio"
            yield f"{gives} adds to the advantages of a reward that algorithm.{other} takes away: drop one of them"

    def _lengths(self) -> Iterator[str]:
        data, buffer = self.data, self.reward.reward_kwargs.overlong_buffer_cfg
        needed, longest = (
            data.max_prompt_length + data.max_response_length,
            self.actor_rollout_ref.rollout.max_model_len,
        )
        if longest < needed:
            both = f"data.max_prompt_length + data.max_response_length = {needed}"
            yield f"{MAX_LENGTH}={longest} is less than {both}: raise it, or lower one of them"
        if buffer.enable and self.reward.reward_manager.name == "dapo" and buffer.len > data.max_response_length:
            limit = f"data.max_response_length={data.max_response_length}"
            yield f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len} is more than {limit}: set it to less"

    def _images(self) -> Iterator[str]:
        """What prompts with images do not go with."""
        shared, by_images = self.actor_rollout_ref, f"data.image_key={self.data.image_key}"
        if self.data.image_key is None:
            return
        strategies = {shared.actor.strategy, self.critic.strategy}
        not_yet = {
            "rollout.name=native, vllm and server (vLLM's) alone take token ids with images": (
                shared.rollout.name not in ("native", "server", "vllm")
            ),
            "do_search=true plays text episodes": self.do_search,
            "agent.compaction makes rows of text": self.plays_episodes and shared.rollout.agent.compaction.enable,
            "strategy=fsdp2 alone trains on images": "megatron" in strategies,
            "ulysses_sequence_parallel_size > 1 divides rows of text": any(
                role.ulysses_sequence_parallel_size > 1 for role in (shared.actor, self.critic)
            ),
            "model.compile and use_liger are for models of text": any(
                model.compile or model.use_liger for model in (shared.model, self.critic.model)
            ),
            "distillation is from teachers that read text": self.distillation.enabled,
            "reward models read text": self.reward.reward_model.enable,
            "algorithm.branch_values branches off answers to text": self.algorithm.branch_values.share > 0,
        }
        yield from (f"{by_images}: {reason}: change that, or drop it" for reason, holds in not_yet.items() if holds)

    def _cluster(self) -> Iterator[str]:
        if self.trainer.node_rank is not None and self.ray_kwargs.ray_init.get("address") is not None:
            yield "trainer.node_rank starts Ray itself and ray_kwargs.ray_init.address joins a cluster: drop one"

    def _batches(self) -> Iterator[str]:
        prompts, sizes = self.data.train_batch_size, dict[int, str]()
        if self.trains_policy:
            sizes[self.actor_rollout_ref.actor.ppo_mini_batch_size] = "actor_rollout_ref.actor"
        if self.trains_critic and self.has_value_model:
            sizes.setdefault(self.critic.ppo_mini_batch_size, "critic")
        for size, role in sizes.items():
            if size > prompts:
                more = f"is more than data.train_batch_size={prompts} prompts: set it to {prompts} or less"
                yield f"{role}.ppo_mini_batch_size={size} prompts {more}"

    def _asynchronous(self) -> Iterator[str]:
        v1, sampler = self.trainer.v1, "trainer.v1.sampler"
        mode, sync_step = f"trainer.v1.trainer_mode={v1.trainer_mode}", v1.separate_async.parameter_sync_step
        if v1.trainer_mode == "separate_async" and not self.rollout_apart:
            yield f"{mode} needs processes for generation: set {ROLLOUT_NODES}=1"
        if v1.trainer_mode == "colocate_async" and self.rollout_apart:
            yield f"{mode} generates in the trainer's processes, and rollout has some of its own: use separate_async"
        updates = self.updates_per_step(self.actor_rollout_ref.actor)
        if sync_step is not None and sync_step % updates:
            yield (
                f"trainer.v1.separate_async.parameter_sync_step={sync_step}: weights are transferred between steps, "
                f"and a step has {updates} updates: set a multiple of that"
            )
        if not v1.runs_ahead:
            return
        most = v1.sampler.max_off_policy_threshold * self.steps_per_transfer
        if v1.batches_ahead > most and not v1.by_batches:
            yield (
                f"trainer.v1.num_warmup_batches={v1.num_warmup_batches} begins batches that are too "
                f"old when they are trained on: set it to {most} or less, or raise {sampler}.max_off_policy_threshold"
            )
        if v1.by_batches and self.steps_per_transfer > 1:
            yield "trainer.v1.deterministic=true transfers weights every step: leave parameter_sync_step at null"
        if self.actor_rollout_ref.rollout.agent.replay_dir is not None:
            yield f"{mode}: recorded episodes are replayed step by step: set trainer_mode=sync"

    @property
    def steps_per_transfer(self) -> int:
        """Steps between two transfers of weights to generators of their own."""
        updates = self.trainer.v1.separate_async.parameter_sync_step
        return 1 if updates is None else max(1, updates // self.updates_per_step(self.actor_rollout_ref.actor))

    def updates_per_step(self, role: UpdateConfig) -> int:
        """Updates of a role, `actor_rollout_ref.actor` or `critic`, on each training batch."""
        if role is self.critic and self.has_probe:
            return 1
        return -(-self.data.train_batch_size // role.ppo_mini_batch_size) * role.ppo_epochs

    @property
    def trains_critic(self) -> bool:
        """Whether the critic is updated."""
        return self.critic.enable and not self.critic.freeze

    @property
    def replays(self) -> bool:
        """Whether the critic trains on earlier steps' samples again."""
        return self.has_value_model and self.trains_critic and self.critic.replay_steps > 0

    @property
    def has_probe(self) -> bool:
        """Whether the critic is a regression on hidden states, and no model."""
        return self.critic.enable and self.critic.kind == "probe"

    @property
    def has_value_model(self) -> bool:
        """Whether the critic is a model."""
        return self.critic.enable and self.critic.kind == "model"

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """`resource_pools` and the `asked_pools`."""
        return {**self.resource_pools, **self.asked_pools}

    @property
    def asked_pools(self) -> dict[str, PoolConfig]:
        """Those that keys of a role ask for in verl's way: `rollout.nnodes`, `reward_model.enable_resource_pool`,
        `distillation.nnodes`."""
        pools, model, rollout = {}, self.reward.reward_model, self.actor_rollout_ref.rollout
        if model.is_role and model.enable_resource_pool:
            processes = model.n_gpus_per_node or self.trainer.n_gpus_per_node or 1
            pools["reward_model"] = PoolConfig(
                roles=["reward_model"], nnodes=max(model.nnodes, 1), n_gpus_per_node=processes
            )
        if rollout.nnodes:
            processes = rollout.n_gpus_per_node or 1
            pools["rollout"] = PoolConfig(roles=["rollout"], nnodes=rollout.nnodes, n_gpus_per_node=processes)
        if self.distillation.enabled and self.distillation.models and (nodes := self.distillation.nnodes):
            processes = self.distillation.n_gpus_per_node
            pools["teacher"] = PoolConfig(roles=["teacher"], nnodes=nodes, n_gpus_per_node=processes)
        return pools

    @property
    def uses_graders(self) -> bool:
        """Whether some samples are scored by a grader."""
        return not self.reward.reward_model.replaces_rule or self.data.has_validation

    @property
    def ref_has_weights(self) -> bool:
        """Whether the reference is a model of its own, not the actor without its adapters."""
        apart = any("ref" in pool.roles for pool in self.pools.values())
        return apart or self.actor_rollout_ref.model.lora_rank == 0

    @property
    def rollout_apart(self) -> bool:
        """Whether generation has processes of its own, which are sent the actor's weights."""
        return any("rollout" in pool.roles for pool in self.pools.values())

    @property
    def policy_loss(self) -> str:
        """Name of the policy loss: `policy_loss.loss_mode`, or what `rollout_correction` puts in its place."""
        correction = self.algorithm.rollout_correction
        if correction.bypass_mode and correction.loss_type == "reinforce":
            return "reinforce"
        return self.actor_rollout_ref.actor.policy_loss.loss_mode

    @property
    def kl_kinds(self) -> set[str]:
        """The kinds of the KL terms that are on."""
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        terms = ((actor.use_kl_loss, actor.kl_loss_type), (algorithm.use_kl_in_reward, algorithm.kl_penalty))
        return {kind for on, kind in terms if on}

    @property
    def measures_lambda(self) -> bool:
        """Whether advantages have the lambda of the least estimated error."""
        return self.algorithm.lam_actor == "auto"

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term, or a critic that reads its hidden states, asks for the reference model."""
        return bool(self.kl_kinds) or (self.has_probe and self.critic.probe.states == "reference")

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether a KL term is estimated from the reference's log-probs of what was sampled."""
        return bool(self.kl_kinds - {"full"})


MAIN_TREE.append(PPOConfig)
