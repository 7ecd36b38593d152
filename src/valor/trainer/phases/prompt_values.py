"""The critic as a predictor of difficulty: values of prompts that nobody has answered yet, for the sampler of rows."""

from collections.abc import Iterator

import torch

from valor.config import PPOConfig
from valor.data.batch import Batch, text_rows
from valor.data.curriculum import DifficultySampler
from valor.trainer.phases.base import Metrics, Phase, where_true
from valor.trainer.phases.update_critic import UpdateCritic

_BATCHES = 4  # of prompts that the critic reads in a step
_KEY = "data.sampler.difficulty.predictor=critic"


class PromptValues(Phase):
    """The critic reads prompts that may come next."""

    name = "prompt_values"
    role = "critic"
    reads = UpdateCritic.reads  # ready with it, it comes after it

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.reads_if_there = UpdateCritic(config).reads_if_there

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        difficulty = config.data.sampler.difficulty
        return difficulty.enable and difficulty.predictor == "critic"

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        wrong = {
            f"{_KEY} needs a critic: set critic.enable=true": not config.critic.enable,
            f"{_KEY} and algorithm.reward_source=critic: the critic's rewards say nothing of right answers": (
                config.algorithm.reward_source == "critic"
            ),
            f"{_KEY} and critic.kind=probe, which reads states of answers: set kind=model": config.has_probe,
            f"{_KEY} reads text alone: set data.image_key=null": config.data.image_key is not None,
            f"{_KEY} needs values of outcomes: set critic.target=absolute": config.critic.target != "absolute",
            f"{_KEY} reads the policy's prompts, and critic.prompt_template others: drop one of the two": (
                config.critic.prompt_template is not None
            ),
        }
        yield from where_true(wrong)

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        inputs = self.resources.collector.inputs
        assert isinstance(inputs.sampler, DifficultySampler), "the predictor is an option of it"
        rows = inputs.sampler.unknown(_BATCHES * inputs.sampler.batch_size)
        if not rows:
            return Batch(), {}
        # A value is that of the state before a token: which token follows the prompt makes no difference.
        questions = text_rows([inputs.train[row].prompt_ids for row in rows], [inputs.eos_token_ids[:1]] * len(rows))
        questions["response_mask"] = torch.ones_like(questions["responses"])
        values, _ = self.resources.critics.compute_values(questions)
        inputs.sampler.predict(rows, values["values"][:, 0].tolist())
        return Batch(), {}
