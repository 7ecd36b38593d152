"""`python -m valor.trainer.main_sft key=value …`: supervised fine-tuning; `rm_train`: reward models from pairs."""

import sys
from collections.abc import Sequence

from valor.config import RMConfig, SFTConfig
from valor.trainer.command import run_command, trains


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("sft", argv, SFTConfig, trains("valor.trainer.supervised:SFTRun"))


def rm_train(argv: Sequence[str] | None = None) -> int:
    """The same for `valor rm train`: a reward model from preference pairs."""
    return run_command("rm train", argv, RMConfig, trains("valor.trainer.rm:RewardModelRun"))


if __name__ == "__main__":
    sys.exit(main())
