"""Every array of the reference vectors (verl 0.9.1's own outputs), values and gradients, to 1e-5.

Defaults are compared at policy tokens and, for estimators by group, in groups of two or more; the same arrays are then
compared whole, with the options that the table of deviations names.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from valor import algorithms

SEEDS = ("seed1", "seed2")
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
GROUPED = {"grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"}
Vectors = dict[str, Tensor]


@pytest.fixture(params=SEEDS)
def vectors(request: pytest.FixtureRequest, shared_dir: Path) -> Vectors:
    with np.load(shared_dir / "golden" / f"{request.param}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def advantage_case(key: str) -> tuple[str, dict[str, float], dict[str, bool], str]:
    """Estimator, gamma/lam, options and rewards of an `out_*_advantages` key."""
    stem = key.removeprefix("out_").removesuffix("_advantages")
    if match := re.fullmatch(r"gae_g([\d.]+)_l([\d.]+)", stem):
        return "gae", {"gamma": float(match[1]), "lam": float(match[2])}, {}, "in_dense"
    if match := re.fullmatch(r"reinforce_plus_plus_g([\d.]+)", stem):
        return "reinforce_plus_plus", {"gamma": float(match[1])}, {}, "in_dense"
    if match := re.fullmatch(r"(grpo|grpo_passk_nosingle)_std([01])", stem):
        name = match[1].removesuffix("_nosingle")
        return name, {}, {"norm_adv_by_std_in_grpo": match[2] == "1"}, "in_rewards"
    return stem, {}, {}, "in_rewards"


def in_company(group: Tensor) -> Tensor:
    return torch.stack([(group == one).sum() > 1 for one in group])


def advantages_of(vectors: Vectors, key: str, **extra: object) -> tuple[Tensor, Tensor, Tensor]:
    name, discounts, options, rewards = advantage_case(key)
    rows = in_company(vectors["in_group"]) if "nosingle" in key else torch.ones(len(vectors["in_group"]), dtype=bool)
    mask = vectors["in_mask"][rows]
    advantages, returns = algorithms.compute_advantages(
        name,
        rewards=vectors[rewards][rows],
        response_mask=mask,
        values=vectors["in_values"][rows],
        group_ids=vectors["in_group"][rows],
        reward_baselines=vectors["in_baseline"][rows],
        **discounts,
        **options,
        **extra,
    )
    return advantages, returns, mask


def test_every_array_has_a_comparison(vectors: Vectors) -> None:
    compared = re.compile(
        r"out_(.*_(advantages|returns)|masked_whiten|kl_.*|agg_.*|ppo_.*|gspo_.*|gpg_loss_.*|cispo_.*|geo_mean_.*"
        r"|value_clip.*|adaptive_kl)"
    )
    assert [key for key in vectors if key.startswith("out_") and not compared.fullmatch(key)] == []


def test_advantages_with_defaults(vectors: Vectors) -> None:
    keys = [key for key in vectors if key.endswith("_advantages")]
    assert len(keys) == 15
    for key in keys:
        advantages, returns, mask = advantages_of(vectors, key)
        rows = in_company(vectors["in_group"]) if advantage_case(key)[0] in GROUPED else slice(None)
        for ours, theirs in ((advantages, vectors[key]), (returns, vectors[key.replace("advantages", "returns")])):
            torch.testing.assert_close((ours * mask)[rows], (theirs * mask)[rows], **TOLERANCE, msg=key)
            assert not ours[mask == 0].any(), f"{key}: not 0 at masked positions"


def test_advantages_of_every_row_agree_with_the_options_of_the_deviation_table(vectors: Vectors) -> None:
    for key in [key for key in vectors if key.endswith("_advantages")]:
        name = advantage_case(key)[0]
        extra: dict[str, object] = {}
        if name in GROUPED:
            extra["singleton"] = "raw"
        if name in ("gae", "remax", "reinforce_plus_plus"):
            extra["reward_on_masked"] = "drop"
        advantages, returns, mask = advantages_of(vectors, key, **extra)
        torch.testing.assert_close(advantages, vectors[key] * mask, **TOLERANCE, msg=key)
        torch.testing.assert_close(returns, vectors[key.replace("advantages", "returns")] * mask, **TOLERANCE, msg=key)


def test_masked_whiten(vectors: Vectors) -> None:
    expected, mask = vectors["out_masked_whiten"], vectors["in_mask"]
    candidates = {name: vectors[name] for name in ("in_values", "in_dense", "in_adv")}
    source = next(
        x
        for x in candidates.values()
        if torch.allclose(algorithms.masked_whiten(x, mask) * mask, expected * mask, atol=1e-5)
    )
    torch.testing.assert_close(algorithms.masked_whiten(source, mask), expected * mask, **TOLERANCE)


def test_kl_estimators_and_their_gradients(vectors: Vectors) -> None:
    kinds = [key.removeprefix("out_kl_") for key in vectors if key.startswith("out_kl_") and not key.endswith("_grad")]
    assert len(kinds) == 6
    mask = vectors["in_mask"]
    for kind in kinds:
        new = vectors["in_new"].clone().requires_grad_()
        kl = algorithms.kl_penalty(new, vectors["in_ref"], kind=kind)
        torch.testing.assert_close(kl.detach(), vectors[f"out_kl_{kind}"], **TOLERANCE, msg=kind)
        (kl * mask).sum().backward()
        torch.testing.assert_close(new.grad, vectors[f"out_kl_{kind}_grad"], **TOLERANCE, msg=kind)


def test_aggregation(vectors: Vectors) -> None:
    keys = [key for key in vectors if key.startswith("out_agg_")]
    assert len(keys) == 6
    for key in keys:
        mode, _, scale = key.removeprefix("out_agg_").partition("_")
        loss = algorithms.aggregate_loss(
            vectors["in_adv"], vectors["in_mask"], mode, scale_factor=float(scale) if scale else None
        )
        torch.testing.assert_close(loss, vectors[key], **TOLERANCE, msg=key)


def loss_and_gradient(vectors: Vectors, name: str, **options: object) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    new = vectors["in_new"].clone().requires_grad_()
    loss, metrics = algorithms.policy_loss(
        name,
        log_probs=new,
        old_log_probs=vectors["in_old"],
        advantages=vectors["in_adv"],
        response_mask=vectors["in_mask"],
        **options,
    )
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, metrics


PPO_SETTINGS = {
    "": {},
    "low0.2_high0.28_": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
    "dual_c1.5_": {"clip_ratio_c": 1.5},
}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("setting", PPO_SETTINGS)
@pytest.mark.parametrize("name", ["ppo", "vanilla"])
def test_ppo(vectors: Vectors, setting: str, mode: str, name: str) -> None:
    stem = f"out_ppo_{setting}{mode}"
    loss, gradient, metrics = loss_and_gradient(vectors, name, loss_agg_mode=mode, **PPO_SETTINGS[setting])
    torch.testing.assert_close(loss, vectors[f"{stem}_loss"], **TOLERANCE)
    torch.testing.assert_close(gradient, vectors[f"{stem}_grad"], **TOLERANCE)
    for ours, theirs in (("pg_clipfrac", "clipfrac"), ("ppo_kl", "kl"), ("pg_clipfrac_lower", "clipfrac_lower")):
        assert metrics[ours].item() == pytest.approx(vectors[f"{stem}_{theirs}"].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "stem"), [("gspo", "gspo"), ("gpg", "gpg_loss"), ("cispo", "cispo"), ("geo_mean", "geo_mean")]
)
def test_other_policy_losses(vectors: Vectors, name: str, stem: str) -> None:
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    loss, gradient, _ = loss_and_gradient(vectors, name, **clips)
    torch.testing.assert_close(loss, vectors[f"out_{stem}_loss"], **TOLERANCE)
    torch.testing.assert_close(gradient, vectors[f"out_{stem}_grad"], **TOLERANCE)


@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_value_loss(vectors: Vectors, clip: float) -> None:
    predicted = vectors["in_vpred"].clone().requires_grad_()
    loss, metrics = algorithms.value_loss(
        values=predicted,
        old_values=vectors["in_values"],
        returns=vectors["in_returns"],
        response_mask=vectors["in_mask"],
        cliprange_value=clip,
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), vectors[f"out_value_clip{clip}_loss"], **TOLERANCE)
    torch.testing.assert_close(predicted.grad, vectors[f"out_value_clip{clip}_grad"], **TOLERANCE)
    assert metrics["vf_clipfrac"].item() == pytest.approx(vectors[f"out_value_clip{clip}_frac"].item(), abs=1e-5)


def test_adaptive_kl_controller(vectors: Vectors) -> None:
    observed, expected = vectors["in_adaptive_kl"].tolist(), vectors["out_adaptive_kl"].tolist()
    matches = []
    for steps in (1, 16, 32, 64, 128, 256, 512):
        controller = algorithms.KLController(0.2, target_kl=6.0, horizon=10000)
        path = []
        for kl in observed:
            controller.update(kl, n_steps=steps)
            path.append(controller.value)
        matches.append(path == pytest.approx(expected, abs=1e-7))
    assert sum(matches) == 1, "exactly one batch size reproduces the recorded coefficients"
