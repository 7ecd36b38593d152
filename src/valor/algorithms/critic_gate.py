"""When to trust a critic: explained variance (EVPO) or ensemble disagreement (AsyPPO, https://arxiv.org/abs/2510.01656)."""

from collections import defaultdict
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from valor.algorithms.gae import gae
from valor.algorithms.groups import GroupIds, Groups, group_index
from valor.algorithms.reductions import keep_masked, masked_mean, masked_var, masked_whiten
from valor.algorithms.registry import choose, register_advantage

GATES: tuple[str, ...] = ("hard", "smooth")
BASELINES: tuple[str, ...] = ("batch", "group")


def critic_weight(values: Tensor, returns: Tensor, response_mask: Tensor, gate: str = "hard") -> tuple[float, float]:
    """g and EV = 1 − Var(G − V) / Var(G) over the policy tokens, all [B, T]; hard: g = 1 where EV > 0, else 0; smooth:
    g = max(EV, 0). Returns that do not vary are explained by their mean: EV is 0."""
    spread = float(masked_var(returns.double(), response_mask))
    unexplained = float(masked_var(returns.double() - values.double(), response_mask))
    explained = 1.0 - unexplained / spread if spread > 1e-12 else 0.0
    return max(explained, 0.0) if choose(gate, GATES, "gate") == "smooth" else float(explained > 0), explained


@register_advantage("evpo", needs_critic=True)
def evpo(
    *,
    rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    group_ids: GroupIds | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_actor: float | None = None,
    lam_critic: float | None = None,
    adaptive_lam_alpha: float | None = None,
    lam_positions: list[float] | None = None,
    bootstrap_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    whitening: str = "batch",
    gate: str = "hard",
    baseline: str = "batch",
    report: Callable[[str, float], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = g A_t^GAE + (1 − g) (G_t − b), with g by the explained variance of the critic (`critic_weight`): EVPO
    (https://arxiv.org/abs/2604.19485).

    G_t: the Monte-Carlo return (λ = 1), which the critic is judged by, whatever λ the advantages have. b: the mean over
    the batch's rows, or over those of the row's prompt (`group`), of each row's mean G_t. gate: "hard" is the paper's;
    "smooth" weighs the two without a jump. The critic's own targets are GAE's, so that it goes on learning while it
    is not used. report(name, number): gets the weight g and EV. Other inputs as in `gae`. A group of one has b = G.
    """
    mask, end = response_mask.to(values.dtype), {"bootstrap_mask": bootstrap_mask, "bootstrap_values": bootstrap_values}
    common = {"rewards": rewards, "response_mask": mask, "values": values, "gamma": gamma, "whitening": "none", **end}
    _, outcome = gae(**common)
    lambdas = {"lam": lam, "lam_actor": lam_actor, "lam_critic": lam_critic, "lam_positions": lam_positions}
    advantages, returns = gae(**common, **lambdas, adaptive_lam_alpha=adaptive_lam_alpha)
    weight, explained = critic_weight(values, outcome, mask, gate)
    of_row, present = masked_mean(outcome.double(), mask, 1), mask.any(1).double()
    if choose(baseline, BASELINES, "baseline") == "group":
        groups = Groups(group_ids, len(mask), mask.device)
        mean = groups.spread(groups.total(of_row * present) / groups.total(present).clamp(min=1.0))
    else:
        mean = ((of_row * present).sum() / present.sum().clamp(min=1.0)).expand_as(of_row)
    centred = keep_masked((outcome.double() - mean.unsqueeze(1)).to(values.dtype), mask)
    if report is not None:
        report("critic/gate", weight)
        report("critic/gate_explained_var", explained)
    mixed = weight * advantages + (1.0 - weight) * centred
    return masked_whiten(mixed, mask, scope=whitening), returns


def shards(group_ids: GroupIds, members: int) -> Tensor:
    """[B] int64: the critic, 0 … members − 1, that learns from each sample: the j-th sample of the i-th prompt goes to
    critic (i + j) mod members, so that each has its own part of every group, and their parts are as large."""
    index = group_index(group_ids, len(group_ids))
    counters = defaultdict(count)
    number = torch.tensor([next(counters[group]) for group in index.tolist()], dtype=torch.int64)
    return (index + number) % members


def where_critics_tell(values: Tensor, response_mask: Tensor, agree: float, diverge: float) -> tuple[Tensor, Tensor]:
    """Two [B, T] masks from the critics' values [K, B, T], by their standard deviation at each of N policy tokens.

    The first is 0 at the ⌊agree N⌋ tokens where it is smallest: the critics agree there, and the advantage is left out.
    The second is 0 at the ⌊diverge N⌋ tokens where it is largest: there the entropy bonus is. Ties are kept.
    """
    spread, here = values.double().std(0), response_mask.bool()
    ordered = spread[here].sort().values
    number = len(ordered)
    if not number:
        return response_mask.float(), response_mask.float()
    lowest = ordered[min(int(agree * number), number - 1)]
    highest = ordered[max(number - 1 - int(diverge * number), 0)]
    return (here & (spread >= lowest)).float(), (here & (spread <= highest)).float()
