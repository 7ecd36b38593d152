"""What `benchmarks/stale_values.py` measures, and the same by drawing episodes token by token."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from valor import algorithms
from valor.user_files import load_file

VTRACE = {"estimator": "vtrace", "options": {"rho_bar": 1e9}}
PREFIX = {"rollout_is": "prefix", "rollout_is_threshold": 1e9}


@pytest.fixture(scope="module")
def stale() -> ModuleType:
    return load_file(str(Path(__file__).parents[3] / "benchmarks" / "stale_values.py"), "path")


@pytest.fixture(scope="module")
def game(stale: ModuleType):
    return stale.Sentences(0)


@pytest.fixture(scope="module")
def path(stale: ModuleType, game) -> list[Tensor]:
    return stale.path(game, updates=4)


def test_the_process_is_solved(stale: ModuleType, game, path: list[Tensor]) -> None:
    """Probabilities of the listed episodes add up to 1, their mean reward is V, the gradient is that of finite
    differences; each update has the divergence asked for, and is an improvement."""
    chance = game.chances(path[-1])
    assert float(chance.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float((chance * game.rewards.sum(1)).sum()) == pytest.approx(float(game.values(path[-1])[0].mean()))
    change = torch.zeros_like(path[-1])
    change[2, 1, 3] = 1e-6
    ends = [float(game.values(path[-1] + sign * change)[0].mean()) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(game.gradient(path[-1])[2, 1, 3]), abs=1e-8)
    worth = [float(game.values(logits)[0].mean()) for logits in path]
    assert worth == sorted(worth)
    assert game.divergence(path[1], path[0]) == pytest.approx(stale.STEP_KL)


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_without_staleness_nothing_is_biased(stale: ModuleType, game, path: list[Tensor], lam: float) -> None:
    for way in (stale.Correction(), stale.Correction(bypass=True), stale.Correction(**VTRACE, policy=PREFIX)):
        found = stale.measure(game, path[-1], path[-1], way, lam)
        assert found.target_bias < 1e-6 and found.gradient_bias < 1e-6 and found.target_noise > 0.1


def test_bias_grows_with_age_and_goes_with_the_correction(stale: ModuleType, game, path: list[Tensor]) -> None:
    """Weights of the policy loss leave the value targets where they were; V-trace takes their bias away, and with
    weights of the prefix that of the gradient, at no more noise than whole-sequence weights have."""
    plain, token, sequence, corrected = [], [], [], []
    for age in (1, 2, 4):
        case = (game, path[-1], path[-1 - age])
        plain.append(stale.measure(*case, stale.Correction(), 1.0))
        token.append(stale.measure(*case, stale.Correction(policy=PREFIX | {"rollout_is": "token"}), 1.0))
        sequence.append(stale.measure(*case, stale.Correction(policy=PREFIX | {"rollout_is": "sequence"}), 1.0))
        corrected.append(stale.measure(*case, stale.Correction(**VTRACE, policy=PREFIX), 1.0))
    for name in ("target_bias", "gradient_bias"):
        biases = [getattr(found, name) for found in plain]
        assert biases[0] < biases[1] < biases[2] and biases[2] > 2 * biases[0]
    assert [found.target_bias for found in token] == [found.target_bias for found in plain]
    for uncorrected, by_token, by_sequence, found in zip(plain, token, sequence, corrected, strict=True):
        assert found.target_bias < 1e-6 < 0.01 * uncorrected.target_bias
        assert found.gradient_bias < 1e-6 < by_token.gradient_bias < uncorrected.gradient_bias
        assert found.gradient_noise < by_sequence.gradient_noise


def test_drawn_episodes_agree(stale: ModuleType, game, path: list[Tensor]) -> None:
    """60,000 episodes drawn token by token: the mean target of the prompts is V^π within four standard errors at age 0
    and with V-trace at age 4, and off by more than ten at age 4 without."""
    present, exact = path[-1], game.values(path[-1])

    def errors(sampler: Tensor, name: str) -> float:
        """Mean of target − V^π over the episodes, in standard errors."""
        draw = torch.Generator().manual_seed(0)
        state = torch.randint(stale.STATES, (60_000,), generator=draw)
        alive, columns = torch.ones(60_000, dtype=torch.bool), []
        rewards = game.all_rewards()
        for t in range(stale.LENGTH):
            token = torch.multinomial(sampler[t].softmax(-1)[state], 1, generator=draw).squeeze(1)
            log_probs = [logits[t].log_softmax(-1)[state, token] for logits in (present, sampler)]
            columns.append((rewards[t, state, token], exact[t, state], *log_probs, alive))
            alive = alive & (token != stale.END)
            state = game.next[state, token]
        reward, value, now, then, mask = (torch.stack(column, 1).double() for column in zip(*columns, strict=True))
        ratios = {"old_log_probs": now, "rollout_log_probs": then, "rho_bar": 1e9} if name == "vtrace" else {}
        _, targets = algorithms.compute_advantages(
            name, rewards=reward * mask, response_mask=mask, values=value, whitening="none", **ratios
        )
        gap = (targets - value)[:, 0]
        return float(gap.mean() / (gap.std() / len(gap) ** 0.5))

    assert abs(errors(present, "gae")) < 4
    assert abs(errors(path[0], "gae")) > 10
    assert abs(errors(path[0], "vtrace")) < 4
