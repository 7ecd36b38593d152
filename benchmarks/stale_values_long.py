"""`stale_values.py` for responses of up to 64 tokens: are its answers those of long responses too?

    python benchmarks/stale_values_long.py --out benchmarks/results/stale_values.md      # one to two minutes

The same divergence of a response is spread over ten times as many tokens, each of which changes by less. V^π and ∇J are
still exact; the episodes are drawn, 40,000 at each age, and biases come with standard errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from page import print_or_write
from stale_values import END, STATES, UPDATES, Correction, Sentences, measure, path, weights
from valor import algorithms

AGES = (0, 1, 4, 8)
EPISODES = 40_000


class DrawnSentences(Sentences):
    """Episodes of up to 64 tokens that one policy has drawn."""

    def list_episodes(self) -> None:
        """None until `draw`: they are too many."""

    def draw(self, logits: Tensor, episodes: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        state = torch.randint(STATES, (episodes,), generator=generator)
        alive, columns = torch.ones(episodes, dtype=torch.bool), []
        for t in range(self.length):
            token = torch.multinomial(logits[t].softmax(-1)[state], 1, generator=generator).squeeze(1)
            columns.append((token, state, alive))
            alive = alive & (token != END)
            state = self.next[state, token]
        self.tokens, self.states, mask = (torch.stack(column, 1) for column in zip(*columns, strict=True))
        self.mask = mask.double()
        self.rewards = self.all_rewards()[torch.arange(self.length), self.states, self.tokens] * self.mask

    def chances(self, logits: Tensor) -> Tensor:
        """The share of each episode in what was drawn, whatever the policy."""
        return torch.full((len(self.tokens),), 1.0 / len(self.tokens), dtype=torch.float64)


def start_errors(game: DrawnSentences, present: Tensor, sampler: Tensor, way: Correction, critic: Tensor) -> str:
    """Mean of target − V^π at the prompts, its standard error, and the standard deviation of a single one."""
    now, then = game.log_probs(present), game.log_probs(sampler)
    ratios = {"old_log_probs": now, "rollout_log_probs": then} if way.estimator == "vtrace" else {}
    values = {"values": game.at(critic), "rewards": game.rewards, "response_mask": game.mask}
    _, targets = algorithms.compute_advantages(way.estimator, **values, whitening="none", **ratios, **way.options)
    error = (targets - game.at(game.values(present)))[:, 0]
    return f"{error.mean():.3f} ± {error.std() / len(error) ** 0.5:.3f} / {error.std():.2f}"


TARGETS = {
    "`gae`": Correction(),
    "`vtrace`": Correction("vtrace"),
}
GRADIENTS = {
    "no correction": Correction(),
    "token (decoupled PPO)": Correction(policy=weights("token")),
    "sequence, at most 5": Correction(policy=weights("sequence", 5.0)),
    "sequence": Correction(policy=weights("sequence")),
    "`vtrace`; token": Correction("vtrace", policy=weights("token")),
    "`vtrace`; prefix, at most 5": Correction("vtrace", policy=weights("prefix", 5.0)),
    "`vtrace`; prefix": Correction("vtrace", policy=weights("prefix")),
}


def tables(episodes: int = EPISODES) -> str:
    game = DrawnSentences(0, length=64)
    policies = path(game)
    present, exact = policies[-1], game.values(policies[-1])
    apart, rows = [], {name: [] for name in (*((name, critic) for critic in (0, 1) for name in TARGETS), *GRADIENTS)}
    for age in AGES:
        sampler = policies[UPDATES - age]
        game.draw(sampler, episodes)
        change = (game.log_probs(present) - game.log_probs(sampler)).abs().sum() / game.mask.sum()
        apart.append(f"{game.divergence(present, sampler):.2f} / {change:.3f}")
        for name, way in TARGETS.items():
            for number, critic in enumerate((exact, game.values(sampler))):
                rows[name, number].append(start_errors(game, present, sampler, way, critic))
        for name, way in GRADIENTS.items():
            found = measure(game, present, sampler, way, 1.0, exact)
            noise = found.gradient_noise / episodes**0.5
            bias = max(found.gradient_bias**2 - noise**2, 0.0) ** 0.5  # what the noise adds to |E ĝ − ∇J|² is taken off
            rows[name].append(f"{bias:.2f} / {found.gradient_noise:.1f}")
    ages = " | ".join(f"age {age}" for age in AGES)
    lines = [f"| value targets of the prompts, λ 1: bias ± error / noise | critic | {ages} |"]
    lines.append("|---|---|" + "---:|" * len(AGES))
    lines.append(f"| KL(present ‖ sampler) of a response / mean change of log π of a token | | {' | '.join(apart)} |")
    for number, critic in enumerate(("exact", "the sampler's")):
        lines += [f"| {name} | {critic} | {' | '.join(rows[name, number])} |" for name in TARGETS]
    lines += ["", f"| policy gradient, exact critic: bias / noise | {ages} |", "|---|" + "---:|" * len(AGES)]
    lines += [f"| {name} | {' | '.join(rows[name])} |" for name in GRADIENTS]
    return "\n".join(lines)


if __name__ == "__main__":
    print_or_write(__doc__, "long", tables)
