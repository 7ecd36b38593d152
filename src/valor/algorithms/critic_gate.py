"""When to trust a critic: where it explains the returns (EVPO)."""

from collections.abc import Callable

from torch import Tensor

from valor.algorithms.gae import gae
from valor.algorithms.groups import GroupIds, Groups
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
