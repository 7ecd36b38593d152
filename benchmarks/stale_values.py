"""What stale samples do to value targets and to the policy gradient, on decision processes that are solved exactly.

    python benchmarks/stale_values.py                                            # the tables, in under a minute
    python benchmarks/stale_values.py --out benchmarks/results/stale_values.md

Sentences of at most six tokens, from three prompts: the state is (position, one of three), a token moves it; tokens
earn a little, the end what the last state is worth. The policy is a table of logits after twelve updates, each an exact
gradient step of the same divergence. V^π, J(π) and ∇J come from dynamic programming. The samples are those of the
policy `age` updates ago. All episodes are enumerated, each with its probability, so that a bias is told without noise
and a standard deviation is exact. The algorithms are Valor's own, in the trainer's order: log-probs of the present
policy, `rollout_correction`, `compute_advantages`, `policy_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from page import print_or_write
from valor import algorithms

TOKENS, STATES, LENGTH, END = 4, 3, 6, 0
AGES = (0, 1, 2, 4, 8)
UPDATES = 12
STEP_KL = 0.02  # nats a response and update
PROCESSES = 5


class Sentences:
    """The decision process, and every episode of it: `tokens`, `states`, `mask`, `rewards`, all [N, length]."""

    def __init__(self, seed: int = 0, length: int = LENGTH) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.length, self.reluctance = length, 0.0 if length == LENGTH else 4.5  # to end, in nats
        self.next = torch.randint(STATES, (STATES, TOKENS), generator=draw)
        self.reward = 0.2 * torch.randn(length, STATES, TOKENS, generator=draw, dtype=torch.float64)
        self.worth = torch.randn(STATES, generator=draw, dtype=torch.float64)
        self.list_episodes()

    def list_episodes(self) -> None:
        strings = torch.tensor([row for row in product(range(TOKENS), repeat=self.length) if _canonical(row)])
        self.tokens, prompts = strings.repeat(STATES, 1), torch.arange(STATES).repeat_interleave(len(strings))
        ended = (self.tokens == END).long().cumsum(1)
        self.mask = ((ended - (self.tokens == END).long()) == 0).double()
        states = [prompts]
        for t in range(self.length):
            states.append(self.next[states[-1], self.tokens[:, t]])
        self.states = torch.stack(states[:-1], 1)
        self.rewards = self.all_rewards()[torch.arange(self.length), self.states, self.tokens] * self.mask

    def all_rewards(self) -> Tensor:
        """[length, STATES, TOKENS] of each token, with the outcome where it ends the episode."""
        rewards = self.reward.clone()
        rewards[:, :, END] += self.worth[self.next[:, END]]
        rewards[-1, :, 1:] += self.worth[self.next[:, 1:]]
        return rewards

    def to_go(self, policy: Tensor, rewards: Tensor) -> Tensor:
        """Σ of the rewards [length, STATES, TOKENS] from each state on, [length, STATES], by dynamic programming."""
        later, values = torch.zeros_like(self.worth), []
        for t in reversed(range(self.length)):
            follows = later[self.next].clone()
            follows[:, END] = 0.0
            later = (policy[t] * (rewards[t] + follows)).sum(-1)
            values.insert(0, later)
        return torch.stack(values)

    def values(self, logits: Tensor) -> Tensor:
        """V^π [length, STATES], with gradient to the logits."""
        return self.to_go(logits.softmax(-1), self.all_rewards())

    def divergence(self, logits: Tensor, other: Tensor) -> float:
        """KL(π ‖ other) of a response."""
        gap = logits.log_softmax(-1) - other.log_softmax(-1)
        return float(self.to_go(logits.softmax(-1), gap)[0].mean())

    def gradient(self, logits: Tensor) -> Tensor:
        """∇J [length, STATES, TOKENS] with J = the mean of V over the prompts."""
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(self.values(logits)[0].mean(), logits)[0]

    def log_probs(self, logits: Tensor) -> Tensor:
        """[N, length] of the episodes' tokens, 0 after the end."""
        return self.at(logits.log_softmax(-1)).gather(2, self.tokens.unsqueeze(2)).squeeze(2) * self.mask

    def chances(self, logits: Tensor) -> Tensor:
        """[N] probabilities of the episodes."""
        return self.log_probs(logits).sum(1).exp() / STATES

    def at(self, table: Tensor) -> Tensor:
        """A table [length, STATES, …] at the episodes' states: [N, length, …]."""
        return table[torch.arange(self.length), self.states]

    def sums(self, x: Tensor) -> Tensor:
        """Σ of x [N, length, …], taken where the mask is 1, by state: [length, STATES, …]."""
        place = (torch.arange(self.length) * STATES + self.states)[self.mask == 1]
        total = x.new_zeros(self.length * STATES, *x.shape[2:]).index_add(0, place, x[self.mask == 1])
        return total.unflatten(0, (self.length, STATES))


def _canonical(tokens: tuple[int, ...]) -> bool:
    """Whether all tokens after the first END are END too, so that an episode is listed once."""
    return END not in tokens or not any(tokens[tokens.index(END) :])


def path(game: Sentences, updates: int = UPDATES, step_kl: float = STEP_KL, seed: int = 0) -> list[Tensor]:
    """Logits of π_0 … π_k: gradient steps, each so long that the responses' KL(new ‖ old) is step_kl."""
    draw = torch.Generator().manual_seed(seed)
    logits = [0.5 * torch.randn(game.length, STATES, TOKENS, generator=draw, dtype=torch.float64)]
    logits[0][:, :, END] -= game.reluctance
    for _ in range(updates):
        direction, low, high = game.gradient(logits[-1]), 0.0, 1e4
        for _ in range(60):
            middle = (low + high) / 2
            far = game.divergence(logits[-1] + middle * direction, logits[-1]) > step_kl
            low, high = (low, middle) if far else (middle, high)
        logits.append(logits[-1] + low * direction)
    return logits


@dataclass(frozen=True)
class Correction:
    """A way to learn from stale samples: the estimator and its options, those of `rollout_correction`, and whether the
    sampler's log-probs are the old ones (bypass_mode)."""

    estimator: str = "gae"
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    bypass: bool = False


@dataclass(frozen=True)
class Found:
    """Value targets against V^π by state, and the policy gradient against ∇J, of one way at one age.

    target_bias: RMS over the states, as often as the present policy visits them. target_noise: RMS of a single target
    about its mean. gradient_bias: |E ĝ − ∇J| / |∇J|. cosine: of E ĝ and ∇J. gradient_noise: the standard deviation of a
    single episode's gradient / |∇J|.
    """

    target_bias: float
    target_noise: float
    gradient_bias: float
    cosine: float
    gradient_noise: float


def measure(
    game: Sentences, present: Tensor, sampler: Tensor, way: Correction, lam: float, critic: Tensor | None = None
) -> Found:
    """What `way` makes of episodes by `sampler` in the hands of `present`, all [length, STATES, TOKENS] logits.

    critic [length, STATES]: its values; None: those to which its own targets lead it, their mean at each state. Targets
    look at later positions alone, so that a round of fitting for each position reaches them.
    """
    chance, exact = game.chances(sampler)[:, None], game.values(present)
    now, then = game.log_probs(present), game.log_probs(sampler)
    correction = algorithms.rollout_correction(
        log_probs=now, rollout_log_probs=then, response_mask=game.mask, **way.policy
    )
    mask = correction.response_mask
    ratios = {"old_log_probs": now, "rollout_log_probs": then} if way.estimator == "vtrace" else {}
    inputs = {"rewards": game.rewards, "response_mask": mask, "lam": lam, "whitening": "none", **ratios, **way.options}

    def mean(x: Tensor) -> Tensor:
        return game.sums(chance * mask * x) / game.sums(chance * mask).clamp(min=1e-300)

    values = exact if critic is None else critic
    for _ in range(game.length if critic is None else 0):
        values = mean(algorithms.compute_advantages(way.estimator, values=game.at(values), **inputs)[1])
    advantages, targets = algorithms.compute_advantages(way.estimator, values=game.at(values), **inputs)
    log_probs = now.clone().requires_grad_()
    loss, _ = algorithms.policy_loss(
        "ppo",
        log_probs=log_probs,
        old_log_probs=then if way.bypass else now,
        advantages=advantages * chance,  # a token's loss is linear in its advantage, up to the sign: Σ is E
        response_mask=mask,
        rollout_is_weights=correction.weights,
        loss_agg_mode="token-sum",
    )
    pushes = -torch.autograd.grad(loss, log_probs)[0]  # of each token on its log π, times the episode's chance
    score = one_hot(game.tokens, TOKENS) - game.at(present.softmax(-1))  # ∇ log π at the token's state
    found, wanted = game.sums(pushes.unsqueeze(2) * score), game.gradient(present)
    # An episode passes through a state once, so that its tokens' gradients are at right angles.
    squares = (pushes.square() * score.square().sum(2) / chance).sum()
    visits, spread = game.sums(game.chances(present)[:, None].expand_as(mask)), targets - game.at(mean(targets))
    return Found(
        target_bias=_rms(mean(targets) - exact, visits),
        target_noise=_rms(mean(spread.square()).sqrt(), visits),
        gradient_bias=float((found - wanted).norm() / wanted.norm()),
        cosine=float((found * wanted).sum() / found.norm().clamp(min=1e-12) / wanted.norm()),
        gradient_noise=float((squares - found.square().sum()).sqrt() / wanted.norm()),
    )


def _rms(x: Tensor, weights: Tensor) -> float:
    return float(((x.square() * weights).sum() / weights.sum()).sqrt())


def weights(level: str, threshold: float | str = 1e9) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


REJECTED = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
TARGETS = {
    "`gae`, λ 1": (Correction(), 1.0),
    "`gae`, λ 0.95": (Correction(), 0.95),
    "`gae`, λ 1, tokens rejected outside of 0.5_2.0": (Correction(policy=REJECTED), 1.0),
    "`vtrace`, λ 1, rho_bar 1": (Correction("vtrace", {"rho_bar": 1.0}), 1.0),
    "`vtrace`, λ 1": (Correction("vtrace"), 1.0),
    "`vtrace`, λ 0.95": (Correction("vtrace"), 0.95),
    "`vtrace`, λ 0.95, c_bar 1.2": (Correction("vtrace", {"c_bar": 1.2}), 0.95),
}
GRADIENTS = {
    "bypass_mode: the clip against the sampler": Correction(bypass=True),
    "no correction": Correction(),
    "token_k1 rejected outside of 0.5_2.0": Correction(policy=REJECTED),
    "seq_mean_k3 rejected above 0.2": Correction(policy={"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.2}),
    "token, IcePop 0.5_5.0": Correction(policy=weights("token", "0.5_5.0")),
    "token, at most 2": Correction(policy=weights("token", 2.0)),
    "token (decoupled PPO)": Correction(policy=weights("token")),
    "sequence, at most 2": Correction(policy=weights("sequence", 2.0)),
    "sequence, at most 5": Correction(policy=weights("sequence", 5.0)),
    "sequence": Correction(policy=weights("sequence")),
    "prefix, at most 5": Correction(policy=weights("prefix", 5.0)),
    "`vtrace`; token, at most 2": Correction("vtrace", policy=weights("token", 2.0)),
    "`vtrace`; prefix, at most 2": Correction("vtrace", policy=weights("prefix", 2.0)),
    "`vtrace`; prefix, at most 5": Correction("vtrace", policy=weights("prefix", 5.0)),
    "`vtrace`; prefix": Correction("vtrace", policy=weights("prefix")),
}


def tables(processes: int = PROCESSES) -> str:
    """Both tables; each number is a mean over the decision processes."""
    games = [Sentences(seed) for seed in range(processes)]
    paths = [path(game, seed=seed) for seed, game in enumerate(games)]

    def over_games(way: Correction, age: int, lam: float, critic: str) -> Found:
        found = []
        for game, logits in zip(games, paths, strict=True):
            present, sampler = logits[-1], logits[-1 - age]
            values = {"exact": game.values(present), "the sampler's": game.values(sampler), "fitted": None}[critic]
            found.append(astuple(measure(game, present, sampler, way, lam, values)))
        return Found(*torch.tensor(found).mean(0).tolist())

    ages = " | ".join(f"age {age}" for age in AGES)
    apart = [
        sum(g.divergence(p[-1], p[-1 - age]) for g, p in zip(games, paths, strict=True)) / processes for age in AGES
    ]
    lines = [f"| value targets: bias / noise | critic | {ages} |", "|---|---|" + "---:|" * len(AGES)]
    lines.append("| KL(present ‖ sampler) of a response | | " + " | ".join(f"{x:.2f}" for x in apart) + " |")
    for critic, (name, (way, lam)) in product(("exact", "the sampler's", "fitted"), TARGETS.items()):
        found = [over_games(way, age, lam, critic) for age in AGES]
        cells = " | ".join(f"{one.target_bias:.3f} / {one.target_noise:.2f}" for one in found)
        lines.append(f"| {name} | {critic} | {cells} |")
    lines += ["", f"| policy gradient: bias / cosine / noise | {ages} |", "|---|" + "---:|" * len(AGES)]
    for name, way in GRADIENTS.items():
        found = [over_games(way, age, 1.0, "fitted") for age in AGES]
        cells = " | ".join(f"{one.gradient_bias:.2f} / {one.cosine:.2f} / {one.gradient_noise:.1f}" for one in found)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print_or_write(__doc__, "tables", tables)
