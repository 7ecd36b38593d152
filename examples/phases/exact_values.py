"""The best critic there is, on walks: V of the present policy, exact, in place of a critic's values.

    valor demo --task walk algorithm.phases_path=examples/phases/exact_values.py critic.kind=probe \
        trainer.critic_warmup=0 algorithm.lam=0

An upper bound for any critic at this lambda. Before each step the policy's chances of all walks from the step's rooms
are computed, and values from their ends backwards. What is no walk has value 0 from its first wrong token on.
"""

import json
from itertools import product

import torch

from valor.data.batch import Batch, text_rows
from valor.data.prompts import token_ids
from valor.errors import UserError
from valor.lab.walk import written
from valor.models.rows import ROW_FIELDS
from valor.rewards.walk import Walk
from valor.trainer.phases.base import Phase, where_true
from valor.trainer.phases.update_critic import UpdateCritic
from valor.trainer.phases.values import Values

MOST = 1 << 17  # walks of a step
AT_ONCE = 1024  # rows of a pass


class ExactValues(Phase):
    """V of the present policy at every state, by a pass of the actor over all walks from the step's rooms."""

    name = "exact_values"
    role = "actor"
    timer = "values"
    reads = frozenset((*ROW_FIELDS, "ground_truth"))
    adds = frozenset(("values",))

    @classmethod
    def contradictions(cls, config):
        algorithm = config.algorithm
        yield from where_true(
            {
                "exact values are of outcomes without discount: set algorithm.gamma=1": algorithm.gamma < 1,
                "exact values are of outcomes alone: set algorithm.use_kl_in_reward=false": algorithm.use_kl_in_reward,
                "exact values are of returns: set critic.target=absolute": config.critic.target != "absolute",
                "exact values end with the response: set algorithm.truncated_responses=end": (
                    algorithm.truncation_bootstrap
                ),
                "trainer.critic_warmup waits for nobody here: set it to 0": config.trainer.critic_warmup > 0,
            }
        )

    def run(self, batch, step):
        prompts = [
            tuple(ids[:n]) for ids, n in zip(batch["prompts"].tolist(), batch["prompt_lengths"].tolist(), strict=True)
        ]
        walks = {
            ids: Walk(**json.loads(text)) for ids, text in zip(prompts, batch.objects["ground_truth"], strict=True)
        }
        values = {ids: self.of_prompt(ids, walk, batch.meta) for ids, walk in walks.items()}
        out = torch.zeros(batch["responses"].shape)
        for row, (ids, response) in enumerate(zip(prompts, batch["responses"].tolist(), strict=True)):
            for t in range(int(batch["response_lengths"][row])):
                out[row, t] = values[ids].get(tuple(response[:t]), 0.0)
        return Batch({"values": out}), {}

    def of_prompt(self, prompt, walk, meta):
        """V by the tokens of the response so far."""
        doors, width = len(walk.leads[0]), self.config.data.max_response_length
        if doors**walk.length > MOST or width != 2 * walk.length:
            raise UserError(
                f"exact values need at most {MOST} walks, and data.max_response_length={2 * walk.length}: walks "
                "have to end where responses are cut"
            )
        texts = [written(walk, taken) for taken in product(range(doors), repeat=walk.length)]
        responses = token_ids(self.resources.collector.inputs.tokenizer, texts)
        rows, actor = text_rows([prompt] * len(responses), responses), self.resources.roles["actor"]
        chances = []
        for start in range(0, len(rows), AT_ONCE):
            part = rows.take(range(start, min(start + AT_ONCE, len(rows)))).select(ROW_FIELDS)
            part.meta |= meta
            chances.append(actor.compute_log_probs(part, with_entropy=False)["old_log_probs"].double().exp())
        after = {tuple(ids): walk.outcome(text) for ids, text in zip(responses, texts, strict=True)}
        chance_of = {}  # of the last token of each beginning
        for ids, row in zip(responses, torch.cat(chances).tolist(), strict=True):
            chance_of |= {tuple(ids[: t + 1]): row[t] for t in range(len(ids))}
        values = {}
        while () not in values:
            before = {}
            for ids, value in after.items():
                before[ids[:-1]] = before.get(ids[:-1], 0.0) + chance_of[ids] * value
            values, after = values | before, before
        return values


def phases(standard, config):
    """The standard phases without a critic's, and the exact values in their place."""
    rest = [phase for phase in standard if not isinstance(phase, Values | UpdateCritic)]
    return [ExactValues(config), *rest]
