"""`valor critic pretrain key=value …`: a critic fitted to rollouts before, or without, any PPO."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from valor.config import CriticPretrainConfig
from valor.trainer.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run (each job of) the command line; the exit code."""
    return run_command("critic pretrain", argv, CriticPretrainConfig, _start)


def _start(config: CriticPretrainConfig, command: str) -> int:
    from valor.algorithms import load_custom
    from valor.controller import resolve_pool
    from valor.trainer.capabilities import check_value_loss
    from valor.trainer.pretrain import CriticPretrainer

    load_custom(config.algorithm.custom_path)
    check_value_loss(config)
    pool, controller = resolve_pool(config.trainer)
    return CriticPretrainer(config, pool, controller, command).fit()


if __name__ == "__main__":
    sys.exit(main())
