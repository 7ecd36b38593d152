"""`python -m valor.trainer.main_rm key=value …`: a reward model from preference pairs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from valor.config import RMConfig
from valor.trainer.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run (each job of) the command line; the exit code."""
    return run_command("rm train", argv, RMConfig, _start)


def _start(config: RMConfig, command: str) -> int:
    from valor.trainer.rm import RewardModelRun

    return RewardModelRun(config, command).fit()


if __name__ == "__main__":
    sys.exit(main())
