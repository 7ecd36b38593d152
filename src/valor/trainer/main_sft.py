"""`python -m valor.trainer.main_sft key=value …`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from valor.config import SFTConfig
from valor.trainer.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run (each job of) the command line; the exit code."""
    return run_command("sft", argv, SFTConfig, _start)


def _start(config: SFTConfig, command: str) -> int:
    from valor.trainer.sft import SFTRun

    return SFTRun(config, command).fit()


if __name__ == "__main__":
    sys.exit(main())
