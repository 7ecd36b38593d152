"""Values on walks without error: every walk from every room, with the policy's own chance of each of its tokens.

A policy's value depends on the whole response so far, not on the room alone. There are doors^length walks from a room,
and any other response scores 0: V^π of every state is a sum over walks, taken from their ends backwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from valor.config.engine import CriticModelConfig, ModelConfig
from valor.data.batch import Batch, text_rows
from valor.data.prompts import render, token_ids
from valor.errors import UserError
from valor.lab.walk import written
from valor.models.load import load_policy, load_tokenizer, load_value_model
from valor.models.rows import ROW_FIELDS
from valor.rewards.walk import Walk

_MOST = 1 << 17  # walks from a room
_AT_ONCE = 1024  # rows of a forward pass


@dataclass(frozen=True)
class States:
    """Every state in which a token of a walk is chosen, [S] each: V^π, V*, and the `chance` with which the policy gets
    there from its room. `rows`: all walks as models read them; state i is before token `token[i]` of row `row[i]`."""

    rows: Batch
    row: Tensor
    token: Tensor
    value: Tensor
    best: Tensor
    chance: Tensor

    @property
    def score(self) -> float:
        """Mean outcome of the policy's samples, over the rooms."""
        return float(self.value[self.token == 0].mean())

    def judge(
        self, critics: Sequence[Path | str], reduce: Callable[[Tensor], Tensor] = lambda v: v.mean(0)
    ) -> dict[str, float]:
        """`against_truth` of a saved critic, or of an ensemble whose values [K, S] become one by `reduce`, over the
        states as often as the policy visits them."""
        found = []
        for path in critics:
            model = load_value_model(CriticModelConfig(path=str(path)))
            values = _in_parts(self.rows, lambda part, model=model: model(part)["values"])
            found.append(values[self.row, self.token])
        return against_truth(reduce(torch.stack(found)), self.value, self.chance)


def exact_values(walk: Walk, policy: Path | str, temperature: float = 1.0) -> States:
    """All states of all rooms, under the policy saved in a directory as it samples at `temperature`.

    UserError: more walks than can be listed.
    """
    doors, length, rooms = len(walk.leads[0]), walk.length, range(len(walk.leads))
    if doors**length > _MOST:
        raise UserError(
            f"{doors} doors and a length of {length}: {doors**length} walks from a room, of at most {_MOST}"
        )
    tokenizer = load_tokenizer(str(policy))
    texts, outcomes = [], []
    for start in (replace(walk, start=room) for room in rooms):
        texts += [written(start, taken) for taken in product(range(doors), repeat=length)]
        outcomes += [start.outcome(text) for text in texts[-(doors**length) :]]
    asked = [render(tokenizer, [{"role": "user", "content": str(room)}], where="walk") for room in rooms]
    prompts = [ids for ids in token_ids(tokenizer, asked) for _ in range(doors**length)]
    rows = text_rows(prompts, token_ids(tokenizer, texts))
    assert rows["responses"].shape[1] == 2 * length, "a token a character"
    model = load_policy(ModelConfig(path=str(policy)))
    chances = _in_parts(rows, lambda part: model(part, temperature=temperature)["log_probs"]).exp()

    # Walks with a common beginning are neighbours: before token t they are `widths[t]`, seen from the first of them.
    widths = [doors ** (length - (t + 1) // 2) for t in range(2 * length + 1)]
    value = best = torch.tensor(outcomes, dtype=torch.float64)
    chance = torch.ones(len(rooms), dtype=torch.float64)
    values, bests, reached = [], [], []
    for t in reversed(range(2 * length)):
        options = widths[t] // widths[t + 1]
        value = (value * chances[:: widths[t + 1], t]).view(-1, options).sum(1)
        best = best.view(-1, options).amax(1)
        values.insert(0, value)
        bests.insert(0, best)
    for t in range(2 * length):
        reached.append(chance)
        chance = chance.repeat_interleave(widths[t] // widths[t + 1]) * chances[:: widths[t + 1], t]
    row = [torch.arange(0, len(texts), width) for width in widths[:-1]]
    token = [torch.full_like(first, t) for t, first in enumerate(row)]
    return States(rows, *(torch.cat(column) for column in (row, token, values, bests, reached)))


def against_truth(values: Tensor, truth: Tensor, weights: Tensor) -> dict[str, float]:
    """V against known true values under the distribution `weights` over states: `explained_variance`
    1 − Var(truth − V) / Var(truth), `bias` E[V − truth], `rank_correlation` (Spearman 1904). NaN where a side is flat.

    values, truth, weights [N]; weights are at least 0 and need not add up to 1. Equal numbers share their mean rank.
    """
    share = weights.double() / weights.double().sum()

    def centred(x: Tensor) -> Tensor:
        return x.double() - (share * x.double()).sum()

    def rank(x: Tensor) -> Tensor:
        _, place = x.unique(return_inverse=True)
        mass = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, share)
        return centred((mass.cumsum(0) - mass / 2)[place])

    def spread(x: Tensor, y: Tensor) -> float:
        return float((share * x * y).sum())

    error, target, ours, theirs = centred(truth - values), centred(truth), rank(values), rank(truth)
    both = math.sqrt(spread(ours, ours) * spread(theirs, theirs))
    varies = spread(target, target) > 0
    return {
        "explained_variance": 1.0 - spread(error, error) / spread(target, target) if varies else math.nan,
        "bias": float((share * (values.double() - truth.double())).sum()),
        "rank_correlation": spread(ours, theirs) / both if both > 0 else math.nan,
    }


@torch.no_grad()
def _in_parts(rows: Batch, columns: Callable[[Batch], Tensor]) -> Tensor:
    """What a model says of all rows, [N, T] in float64."""
    parts = (rows.take(range(i, min(i + _AT_ONCE, len(rows)))) for i in range(0, len(rows), _AT_ONCE))
    return torch.cat([columns(part.select(ROW_FIELDS)) for part in parts]).double()
