"""How long each advantage estimator takes beside verl 0.9.1's function of the same name, on the CPU, in one process.

    PYTHONPATH=src python benchmarks/algorithms_vs_verl.py [--threads 1] [--clock cpu] [--markdown]

verl does not fit into Valor's environment; make one of its own for it:

    python3.11 -m venv verl-venv
    verl-venv/bin/pip install torch==2.13.0 numpy
    verl-venv/bin/pip install --no-deps verl==0.9.1
    verl-venv/bin/pip install "tensordict==0.10.*" "transformers==5.10.*" orjson codetiming dill pylatexenc wandb \
        datasets ray hydra-core packaging cachetools
    verl-venv/bin/pip install --no-deps torchdata peft torchvision accelerate psutil
    PYTHONPATH=src verl-venv/bin/python benchmarks/algorithms_vs_verl.py

The two take turns; each time is the best of the repeats, so that other work on the machine disturbs both little and
alike (on a busy one, --clock cpu). Before it is timed, each pair must agree to 1e-3 at policy tokens (long float32 sums
differ in the last digits).
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from valor import algorithms

Pair = tuple[Tensor, Tensor]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    """One row of the table: both functions on the same inputs."""

    name: str
    shape: tuple[int, int]
    mask: Tensor
    ours: Callable[[], Pair]
    theirs: Callable[[], Pair]


def response_mask(kind: str, rows: int, width: int) -> Tensor:
    """full: no padding; ragged: uniform lengths; gaps: ragged, with a tenth of observation tokens in runs of 64."""
    generator = torch.Generator().manual_seed(0)
    if kind == "full":
        return torch.ones(rows, width)
    lengths = torch.randint(width // 8, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).float()
    if kind == "gaps":
        runs = torch.rand(rows, width // 64, generator=generator) < 0.1
        mask = mask * ~runs.repeat_interleave(64, dim=1)
        mask[:, 0] = 1.0
    return mask


def scan_cases(core: object, rows: int, width: int) -> list[Case]:
    """Estimators that run along the response."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, width, generator=generator)
    cases = []
    for kind in ("full", "ragged", "gaps"):
        mask = response_mask(kind, rows, width)
        rewards = torch.randn(rows, width, generator=generator) * mask * (torch.rand(rows, width) < 0.01)
        for gamma, lam in ((1.0, 1.0), (0.99, 0.95)):
            cases.append(
                Case(
                    f"gae, {kind}, gamma {gamma}, lam {lam}",
                    (rows, width),
                    mask,
                    partial(ours, "gae", rewards, mask, values=values, gamma=gamma, lam=lam),
                    partial(core.compute_gae_advantage_return, rewards, values, mask, gamma, lam),  # type: ignore[attr-defined]
                )
            )
    mask = response_mask("gaps", rows, width)
    baselines = torch.randn(rows, generator=generator)
    rewards = torch.randn(rows, width, generator=generator) * mask
    plus_plus, remax = core.compute_reinforce_plus_plus_outcome_advantage, core.compute_remax_outcome_advantage  # type: ignore[attr-defined]
    cases.append(
        Case(
            "reinforce_plus_plus, gaps, gamma 0.99",
            (rows, width),
            mask,
            partial(ours, "reinforce_plus_plus", rewards, mask, gamma=0.99),
            partial(plus_plus, rewards, mask, config=argparse.Namespace(gamma=0.99)),
        )
    )
    cases.append(
        Case(
            "remax, gaps",
            (rows, width),
            mask,
            partial(ours, "remax", rewards, mask, reward_baselines=baselines),
            partial(remax, rewards, baselines, mask),
        )
    )
    return cases


def group_cases(core: object, rows: int, width: int, per_prompt: int) -> list[Case]:
    """Estimators that compare the samples of a prompt."""
    generator = torch.Generator().manual_seed(2)
    mask = response_mask("ragged", rows, width)
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), mask.sum(1).long() - 1] = torch.randn(rows, generator=generator)
    ids = np.array([f"prompt-{row // per_prompt}" for row in range(rows)], dtype=object)
    order = torch.randperm(rows, generator=generator).numpy()
    ids, extras = ids[order], {}
    extras["optimal_token_baseline"] = {
        "old_log_probs": -torch.rand(rows, width, generator=generator),
        "sum_pi_squared": torch.rand(rows, width, generator=generator),
    }
    config = argparse.Namespace(get={"norm_adv_by_std_in_grpo": True}.get)
    cases = []
    for name in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "gdpo"):
        theirs = getattr(core, f"compute_{name}_outcome_advantage")
        own = {"component_scores": {"score": rewards.sum(1)}} if name == "gdpo" else {}
        cases.append(
            Case(
                name,
                (rows, width),
                mask,
                partial(ours, name, rewards, mask, group_ids=ids, **own),
                partial(theirs, rewards, mask, index=ids, config=config),
            )
        )
    inputs = extras["optimal_token_baseline"]
    cases.append(
        Case(
            "optimal_token_baseline",
            (rows, width),
            mask,
            partial(ours, "optimal_token_baseline", rewards, mask, group_ids=ids, **inputs),
            partial(core.compute_optimal_token_baseline_advantage, rewards, mask, ids, **inputs),  # type: ignore[attr-defined]
        )
    )
    return cases


def ours(name: str, rewards: Tensor, mask: Tensor, **inputs: object) -> Pair:
    return algorithms.compute_advantages(name, rewards=rewards, response_mask=mask, **inputs)  # type: ignore[arg-type]


def best_times(case: Case, repeats: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Best times in seconds, ours and verl's, after a check that both say the same."""
    scale = 1.0
    for one, other in zip(case.ours(), case.theirs(), strict=True):
        scale = max(scale, other.abs().max().item())
        difference = ((one - other) * case.mask).abs().max().item()
        if not difference <= 1e-3 * scale:
            raise SystemExit(f"{case.name}: differs from verl by {difference:.2g}")
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for place, function in enumerate((case.ours, case.theirs)):
            start = clock()
            function()
            best[place] = min(best[place], clock() - start)
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a machine that is busy"
    )
    parser.add_argument("--rows", type=int, default=1024, help="sequences for the estimators that run along them")
    parser.add_argument("--width", type=int, default=8192, help="their positions")
    parser.add_argument("--samples", type=int, default=4096, help="sequences for the estimators by group")
    parser.add_argument("--sample-width", type=int, default=512)
    parser.add_argument("--per-prompt", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    try:
        from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]
    except ImportError as error:
        raise SystemExit(f"needs verl 0.9.1 beside Valor ({error}); see the top of this file") from None

    torch.set_num_threads(args.threads)
    cases = scan_cases(core_algos, args.rows, args.width)
    cases += group_cases(core_algos, args.samples, args.sample_width, args.per_prompt)
    line = "| {:<36} | {:>12} | {:>9} | {:>9} | {:>6} |" if args.markdown else "{:<38} {:>12} {:>10} {:>10} {:>7}"
    print(line.format("estimator", "shape", "valor ms", "verl ms", "ratio"), flush=True)
    if args.markdown:
        print("|---|---|---:|---:|---:|")
    for case in cases:
        if args.only in case.name:
            mine, theirs = best_times(case, args.repeats, CLOCKS[args.clock])
            shape = f"{case.shape[0]}x{case.shape[1]}"
            numbers = (f"{1e3 * mine:.1f}", f"{1e3 * theirs:.1f}", f"{theirs / mine:.1f}")
            print(line.format(case.name, shape, *numbers), flush=True)


if __name__ == "__main__":
    main()
