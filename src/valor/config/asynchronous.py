"""`trainer.v1`: whether generation runs ahead of training, how far, and what becomes of samples that are too old."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from valor.config.base import Section, key, section


class ColocateAsyncConfig(Section):
    """Generation in the trainer's processes, in turns with it; what is unfinished goes on in the next step."""

    num_warmup_batches: PositiveInt = 1
    """Batches of prompts that are begun beyond the one of the step."""


class SeparateAsyncConfig(Section):
    """Generation in processes of its own, beside training."""

    num_warmup_batches: PositiveInt = 1
    """Batches of prompts that are begun beyond the one of the step."""
    parameter_sync_step: PositiveInt | None = None
    """Updates of the actor between two transfers of weights, a multiple of those of a step; null: those of a step."""
    clear_kv_cache_on_weight_sync: bool = True
    """true: what is being generated begins anew from its tokens; false: it goes on behind the old keys and values."""


class SamplerConfig(Section):
    """Age of samples, in versions of the weights that were transferred since the oldest token."""

    max_off_policy_threshold: NonNegativeInt = 8
    """Largest age of a sample that is trained on; 0: only the newest weights, as in synchronous training."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """drop: what is too old is left out and drawn again; wait: training waits for what would become too old."""


class V1Config(Section):
    """Synchronous and asynchronous training."""

    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """sync: generate, then train; colocate_async: unfinished samples go on next time; separate_async: both at once."""
    colocate_async: ColocateAsyncConfig = section(ColocateAsyncConfig, "trainer.v1.trainer_mode=colocate_async")
    separate_async: SeparateAsyncConfig = section(SeparateAsyncConfig, "trainer.v1.trainer_mode=separate_async")
    sampler: SamplerConfig = section(SamplerConfig, "trainer.v1.trainer_mode!=sync")
    deterministic: bool = key(False, "trainer.v1.trainer_mode=separate_async")
    """Every batch by weights exactly max_off_policy_threshold steps old, so that a run repeats bit for bit."""

    @property
    def runs_ahead(self) -> bool:
        """Whether samples may be of other weights than those that they train."""
        return self.trainer_mode != "sync" and self.sampler.max_off_policy_threshold > 0

    @property
    def by_batches(self) -> bool:
        """Whether each batch is generated as a whole, by weights of a prescribed age."""
        return self.trainer_mode == "separate_async" and (self.deterministic or not self.runs_ahead)

    @property
    def num_warmup_batches(self) -> int:
        """Batches that are begun beyond the one of the step."""
        if not self.runs_ahead:
            return 0
        return getattr(self, self.trainer_mode).num_warmup_batches

    def contradictions(self, at: str) -> Iterator[str]:
        if self.trainer_mode == "colocate_async" and not self.runs_ahead:
            yield (
                f"{at}sampler.max_off_policy_threshold=0 leaves colocate_async nothing to carry over to the next step: "
                "raise it, or set trainer_mode=sync"
            )
