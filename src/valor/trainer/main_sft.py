"""`python -m valor.trainer.main_sft key=value …`: supervised fine-tuning; `rm_train`: reward models from pairs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from valor.config import RMConfig, SFTConfig
from valor.trainer.command import run_command, trains

if TYPE_CHECKING:
    from valor.trainer.supervised import SupervisedRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("sft", argv, SFTConfig, trains(sft_run))


def rm_train(argv: Sequence[str] | None = None) -> int:
    """The same for `valor rm train`: a reward model from preference pairs."""
    return run_command("rm train", argv, RMConfig, trains(rm_run))


def sft_run(config: SFTConfig, command: str) -> SupervisedRun:
    from valor.trainer.supervised import SFTRun

    return SFTRun(config, command)


def rm_run(config: RMConfig, command: str) -> SupervisedRun:
    from valor.trainer.rm import RewardModelRun

    return RewardModelRun(config, command)


if __name__ == "__main__":
    sys.exit(main())
