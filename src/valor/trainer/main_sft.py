"""`python -m valor.trainer.main_sft key=value …`: supervised fine-tuning; `rm_train`: reward models from pairs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from valor.config import RMConfig, SFTConfig
from valor.trainer.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("sft", argv, SFTConfig, _sft)


def rm_train(argv: Sequence[str] | None = None) -> int:
    """The same for `valor rm train`: a reward model from preference pairs."""
    return run_command("rm train", argv, RMConfig, _rm_train)


def _sft(config: SFTConfig, command: str) -> int:
    from valor.trainer.run import fit_again
    from valor.trainer.sft import SFTRun

    return fit_again(SFTRun(config, command), lambda: SFTRun(config, command))


def _rm_train(config: RMConfig, command: str) -> int:
    from valor.trainer.rm import RewardModelRun
    from valor.trainer.run import fit_again

    return fit_again(RewardModelRun(config, command), lambda: RewardModelRun(config, command))


if __name__ == "__main__":
    sys.exit(main())
