"""Values of the critic: by a pass of their own, or by the forward pass of the one update that a batch gets."""

from collections.abc import Iterator

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.rows import ROW_FIELDS
from valor.tracking.progress import phase
from valor.trainer.advantage import targets_by_ranks
from valor.trainer.phases.base import Metrics, Phase, where_true
from valor.trainer.prompt_templates import CRITIC_PROMPTS
from valor.workers.probe import POLICY_MASK, VALUE_ERROR
from valor.workers.roles import critic_names

CRITIC_IS_UPDATED = "critic_is_updated"  # in a batch's meta: the step's update has given the values


class Values(Phase):
    """One pass of the critic over the batch."""

    name = "values"
    role = "critic"
    reads = frozenset((*ROW_FIELDS, "response_mask"))
    reads_if_there = frozenset(("episode", *CRITIC_PROMPTS))

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        members = critic_names(config)
        self.with_end = config.algorithm.truncation_bootstrap
        adds = ["values", *(f"values/{name}" for name in members if len(members) > 1)]
        adds += ["bootstrap_values"] * self.with_end + [POLICY_MASK] * config.has_probe
        adds += [VALUE_ERROR] * config.measures_lambda
        self.adds = frozenset(adds)

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.critic.enable and targets_by_ranks(config) is None

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        critic, policy = config.critic, config.actor_rollout_ref.model
        if config.has_probe:
            yield from _probe(config)
        elif critic.freeze and critic.model.path == policy.path and critic.model.lora_adapter_path is None:
            yield (
                "critic.freeze=true uses the critic as it is loaded, and critic.model.path is not set: set it to a "
                "critic that has been trained (valor critic pretrain, or huggingface/critic in the folder of a run)"
            )

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        critics = self.resources.critics
        with phase("values", len(batch), unit="sample"):
            return critics.compute_values(batch, with_end=self.with_end)


def _probe(config: PPOConfig) -> Iterator[str]:
    """What a critic without a model does not go with."""
    role = "actor" if config.critic.probe.states == "policy" else "ref"
    apart = [name for name, pool in config.pools.items() if ("critic" in pool.roles) != (role in pool.roles)]
    strategy, algorithm = "actor_rollout_ref.actor.strategy", config.algorithm
    by_turn = algorithm.adv_estimator == "gae" and algorithm.gae_unit != "token"
    wrong = {
        "critic.kind=probe reads the hidden states of all layers, and with megatron-core no process has them: set "
        f"{strategy}=fsdp2, or critic.kind=model": config.actor_rollout_ref.actor.strategy == "megatron",
        f"critic.kind=probe reads hidden states where the {role} computes them: leave both out of resource_pools"
        + ", or put both into one pool" * (role == "ref"): bool(apart),
        "critic.kind=probe learns outcomes, and with algorithm.lam_turn below 1 targets are values of its own: set "
        "lam_turn=1, or critic.kind=model": by_turn and algorithm.lam_turn < 1,
    }
    yield from where_true(wrong)


class ValuesInTheUpdate(Values):
    """The critic's one update of a batch: its forward pass gives the values, from which its ranks make the targets.

    A step for which that is impossible (frozen critic, episodes of several rows, several updates) takes a pass for the
    values and leaves the update to `UpdateCritic`.
    """

    trains = True
    reads = Values.reads | {"token_level_rewards"}

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.adds = self.adds | {CRITIC_IS_UPDATED}

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return targets_by_ranks(config) is not None

    def plan(self) -> str:
        update = "regression, refitted for the next step" if self.config.has_probe else "update"
        return f"the critic's {update}, whose forward pass gives the values"

    def timing(self, batch: Batch, step: int) -> str:
        return "update_critic" if self.resources.critics.values_in_update(batch, step) else "values"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        if self.resources.critics.values_in_update(batch, step):
            values, metrics = self.resources.critics.update_with_values(batch, step)
            return values.union(Batch(meta={CRITIC_IS_UPDATED: True})), metrics
        return super().run(batch, step)
