"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives; `critic_pretrain`: a critic before them."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from valor.config import CriticPretrainConfig, PPOConfig
from valor.trainer.command import run_command, trains


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("ppo", argv, PPOConfig, _ppo)


def critic_pretrain(argv: Sequence[str] | None = None) -> int:
    """The same for `valor critic pretrain`: a critic fitted to rollouts before, or without, any PPO."""
    return run_command(
        "critic pretrain", argv, CriticPretrainConfig, trains("valor.trainer.pretrain:CriticPretrainRun")
    )


def _ppo(config: PPOConfig, command: str) -> int:
    from valor.controller.nodes import node_zero, serve
    from valor.trainer.checks import placed
    from valor.trainer.ppo import PPORun
    from valor.trainer.run import fit_again

    rank = config.trainer.node_rank
    if rank:
        return serve(config.trainer, placed(config))
    run = PPORun(config, command)
    with nullcontext() if rank is None else node_zero(config.trainer, run.placement):
        return fit_again(run, partial(PPORun, config, command))


if __name__ == "__main__":
    sys.exit(main())
