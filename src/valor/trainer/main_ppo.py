"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives; `critic_pretrain`: a critic before them."""

import sys
from collections.abc import Sequence

from valor.config import CriticPretrainConfig, PPOConfig
from valor.trainer.command import run_command, trains


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("ppo", argv, PPOConfig, trains("valor.trainer.ppo:PPORun"))


def critic_pretrain(argv: Sequence[str] | None = None) -> int:
    """The same for `valor critic pretrain`: a critic fitted to rollouts before, or without, any PPO."""
    return run_command(
        "critic pretrain", argv, CriticPretrainConfig, trains("valor.trainer.pretrain:CriticPretrainRun")
    )


if __name__ == "__main__":
    sys.exit(main())
