"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives; `critic_pretrain`: a critic before them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from valor.config import CriticPretrainConfig, PPOConfig
from valor.trainer.command import run_command, trains

if TYPE_CHECKING:
    from valor.trainer.ppo import PPORun
    from valor.trainer.pretrain import CriticPretrainRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("ppo", argv, PPOConfig, _ppo)


def critic_pretrain(argv: Sequence[str] | None = None) -> int:
    """The same for `valor critic pretrain`: a critic fitted to rollouts before, or without, any PPO."""
    return run_command("critic pretrain", argv, CriticPretrainConfig, trains(_critic_pretrain))


def ppo_run(config: PPOConfig, command: str) -> PPORun:
    """The run, with everything that it reads. UserError: bad input, or no place for it."""
    from valor.collector.inputs import RunInputs
    from valor.models.load import check_critic_tokenizer
    from valor.tracking.progress import phase
    from valor.trainer.checks import placed
    from valor.trainer.ppo import PPORun

    placement = placed(config)
    with phase("tokenizer, data and graders"):
        inputs = RunInputs(config)
    check_critic_tokenizer(config, inputs.tokenizer)
    return PPORun(config, inputs, placement, command)


def _ppo(config: PPOConfig, command: str) -> int:
    from valor.controller.nodes import node_zero, serve
    from valor.trainer.checks import placed
    from valor.trainer.run import fit_again

    rank = config.trainer.node_rank
    if rank:
        return serve(config.trainer, placed(config))
    run = ppo_run(config, command)
    with nullcontext() if rank is None else node_zero(config.trainer, run.placement):
        return fit_again(run, partial(ppo_run, config, command))


def _critic_pretrain(config: CriticPretrainConfig, command: str) -> CriticPretrainRun:
    from valor.controller.placement import resolve_pool
    from valor.trainer.pretrain import CriticPretrainRun

    pool = resolve_pool(config.trainer, config.ray_kwargs.ray_init.address)
    return CriticPretrainRun(config, *pool, command)


if __name__ == "__main__":
    sys.exit(main())
