"""A critic that reads more than the policy (`critic.prompt_template`): a reference answer, or what a tool has drawn.

Its values are still a baseline that leaves the policy gradient unbiased, as long as what it reads besides does not
depend on the policy's tokens (asymmetric actor-critic, https://arxiv.org/abs/1710.06542): columns of the data, and what
an environment has drawn before the policy's first token.
"""

from collections.abc import Iterator

from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.data.batch import Batch, Episodes, unpadded
from valor.data.prompts import render, token_ids
from valor.errors import StepRefused, UserError
from valor.trainer.phases.base import Metrics, Phase, where_true
from valor.trainer.prompt_templates import COLUMNS, CRITIC_PROMPTS, check_longest, columns_of, filled, reading_more

KEY = "critic.prompt_template"


class CriticPrompts(Phase):
    """The prompts that the critic reads, with more in them than the policy's."""

    name = "critic_prompts"
    timer = "values"
    reads = frozenset(("prompts", "prompt_lengths", *COLUMNS))
    reads_if_there = frozenset(("episode", "episode_info", "messages", "template_kwargs"))
    adds = frozenset(CRITIC_PROMPTS)

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.critic.enable and config.critic.prompt_template is not None

    @classmethod
    def contradictions(cls, config: PPOConfig) -> Iterator[str]:
        agent = config.actor_rollout_ref.rollout.agent
        wrong = {
            f"{KEY} is for episodes of one row, and actor_rollout_ref.rollout.agent.compaction.enable=true cuts them: "
            "drop one of the two": agent.compaction.enable,
            f"{KEY} adds text, and data.image_key={config.data.image_key} makes prompts of parts: drop it": (
                config.data.image_key is not None
            ),
        }
        yield from where_true(wrong)

    def plan(self) -> str:
        return f"the critic's prompts, by {KEY}"

    def refuse(self, batch: Batch) -> None:
        if Episodes(batch).forked:
            raise StepRefused(f"{KEY} is for episodes of one row, and this step has some of several: drop it")

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """UserError: a row's prompt is not that of its messages, so that the template has no place in it."""
        template, data = self.config.critic.prompt_template, self.config.data
        assert template is not None
        tokenizer, options = self.resources.collector.inputs.tokenizer, data.apply_chat_template_kwargs
        same = reading_more(batch, "{prompt}", KEY, tokenizer, options)
        if unpadded(same, "prompt") != unpadded(batch, "prompt"):
            raise UserError(
                f"{KEY} is for prompts as the data has them, and an agent or data.truncation has changed some: drop it"
            )
        hidden = [info.get("hidden", {}) for info in batch.objects.get("episode_info", [])]
        more = reading_more(batch, template, KEY, tokenizer, options, hidden or None)
        return Batch({f"critic_{name}": more[name] for name in ("prompts", "prompt_lengths")}), {}


def check_critic_prompts(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: `critic.prompt_template` names a column that a training row does not have, or the critic has too few
    positions for the longest prompt and a response."""
    template, tokenizer = config.critic.prompt_template, inputs.tokenizer
    if not CriticPrompts.wanted(config) or template is None:
        return
    worlds = (config.actor_rollout_ref.rollout.agent.environment, config.data.taskset)
    drawn = any(world is not None for world in worlds)  # what an environment draws is not known yet
    longest = 0
    for row in inputs.train:
        try:
            columns = columns_of(row.data_source, row.ground_truth, row.extra_info)
            messages = filled(template, KEY, row.messages, columns)
        except UserError:
            if drawn:
                return
            raise
        longest = max(longest, len(token_ids(tokenizer, [render(tokenizer, messages, row.template_kwargs)])[0]))
    critic = config.critic.model if config.has_value_model else config.actor_rollout_ref.model
    check_longest(KEY, longest, config.data.max_response_length, critic)
