"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives from one configuration."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from valor.config import LoadedConfig, PPOConfig, inert_settings, load_runs, plan
from valor.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run (each job of) the command line. Exit code 0; 1: the run ended itself; 2: a mistake in what was asked for."""
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        for loaded in load_runs(arguments, PPOConfig):
            code = run(loaded, command=shlex.join(["valor", "ppo", *arguments]))
            if code:
                return code
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def run(loaded: LoadedConfig[PPOConfig], command: str) -> int:
    """One run, recorded as what `command` asked for.

    Torch and the models are imported only when the configuration has turned out to be valid.
    """
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if loaded.dry_run:
        print(plan(loaded.config, loaded.explicit_keys))
        return 0
    for key, reason in inert_settings(loaded.config, loaded.explicit_keys):
        print(f"note: {key}: {reason}", file=sys.stderr)
    from valor.controller import resolve_pool
    from valor.trainer.capabilities import check_algorithms
    from valor.trainer.inputs import RunInputs
    from valor.trainer.ppo import PPOTrainer, TrainingStopped

    check_algorithms(loaded.config)
    pool, controller = resolve_pool(loaded.config.trainer)
    trainer = PPOTrainer(loaded.config, RunInputs(loaded.config), pool, controller, command)
    try:
        return trainer.fit()
    except TrainingStopped as reason:
        print(f"stopped: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
