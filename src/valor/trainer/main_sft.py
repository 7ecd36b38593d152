"""`python -m valor.trainer.main_sft key=value …`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from valor.config import LoadedConfig, SFTConfig, inert_settings, load_runs, plan
from valor.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run (each job of) the command line. Exit code 0; 1: the run ended itself; 2: a mistake in what was asked for."""
    try:
        for loaded in load_runs(list(sys.argv[1:] if argv is None else argv), SFTConfig):
            code = run(loaded)
            if code:
                return code
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def run(loaded: LoadedConfig[SFTConfig]) -> int:
    """One run. Torch and the model are imported only when the configuration has turned out to be valid."""
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if loaded.dry_run:
        print(plan(loaded.config, loaded.explicit_keys))
        return 0
    for key, reason in inert_settings(loaded.config, loaded.explicit_keys):
        print(f"note: {key}: {reason}", file=sys.stderr)
    from valor.trainer.sft import SFTTrainer
    from valor.trainer.stopped import TrainingStopped

    try:
        return SFTTrainer(loaded.config).fit()
    except TrainingStopped as reason:
        print(f"stopped: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
