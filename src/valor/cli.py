"""`valor …`: every command in one table; what a command needs is imported when it is called."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
from click.shell_completion import shell_complete

from valor import __version__
from valor.arguments import PAGES, PATH, Command, command, option, run
from valor.errors import UserError, did_you_mean, exit_code
from valor.tracking.rundir import disk_errors

# "module:function" and a line of help. The function is a click command, or in RUNS.
COMMANDS = {
    "ppo": ("valor.trainer.main_ppo:main", "train with PPO, GRPO or a relative: key=value …"),
    "sft": ("valor.trainer.main_sft:main", "supervised fine-tuning: key=value …"),
    "rm train": ("valor.trainer.main_sft:rm_train", "a reward model from preference pairs: key=value …"),
    "demo": ("valor.lab.demo:main", "[--task search]: a tiny model made, warm-started and trained by PPO here"),
    "critic pretrain": ("valor.trainer.main_ppo:critic_pretrain", "fit a critic to rollouts: key=value …"),
    "critic score": ("valor.lab.critic_runs:score", "the scorecard of a critic: key=value …"),
    "critic search": ("valor.lab.critic_runs:search", "accuracy of answers that a critic chooses: key=value …"),
    "eval": ("valor.lab.commands:evaluate", "MODEL …: pass@k with intervals, models compared: key=value …"),
    "critic publish": ("valor.lab.publish:main", "CKPT_OR_HF_DIR OUT: a critic as a model with a card"),
    "publish": ("valor.lab.publish:actor", "CKPT_OR_HF_DIR OUT: a policy as a model with a card"),
    "lab sweep": ("valor.lab.sweep:main", "FILE.yaml: arms x seeds of a command, with intervals and tests"),
    "config keys": ("valor.cli:config_keys", "[PREFIX or WORD …]: keys with type, default and meaning"),
    "plan": ("valor.lab.commands:plan", "[--gpus N --memory GIB]: memory of a run before it: key=value …"),
    "doctor": ("valor.lab.doctor:main", "what this machine has, and whether a run works on it, in seconds"),
    "algorithms": ("valor.cli:algorithms", "the advantage estimators and losses, and what each needs"),
    "data prepare": ("valor.data.prepare:main", "[NAME]: a public data set, or your own, as files to train on"),
    "rewards list": ("valor.rewards.registry:main", "which grader scores which data_source, and its components"),
    "rewards sandbox": ("valor.sandbox.levels:main", "how this machine encloses code of models"),
    "retrieve": ("valor.agents.search.server:main", "CORPUS: a search server for agents over documents of yours"),
    "serve": (
        "valor.lab.commands:serve",
        "MODEL: an OpenAI-compatible server to try agents with, which records episodes",
    ),
    "chat": (
        "valor.lab.commands:chat",
        "MODEL [--critic DIR]: talk to a policy, with the critic's value of each answer",
    ),
    "export": ("valor.cli:export", "CKPT OUT [--role critic]: a checkpoint as a Hugging Face directory"),
    "report": ("valor.cli:report", "RUN_DIR: report.html from what a run has left so far"),
}
RUNS = {
    "ppo": ("--config-name ppo_config trainer.total_epochs=1 --dry-run", "quickstart"),
    "sft": ("model.path=MODEL data.train_files=chats.parquet", "sft"),
    "rm train": ("model.path=MODEL data.train_files=pairs.parquet", "reward_models"),
    "critic pretrain": ("actor_rollout_ref.model.path=MODEL data.train_files=prompts.parquet", "critic"),
    "critic score": ("critic.model.path=CRITIC data.val_files=prompts.parquet", "critic"),
    "critic search": ("actor_rollout_ref.model.path=POLICY critic.model.path=CRITIC", "critic"),
    "eval": ("MODEL data.val_files=test.parquet actor_rollout_ref.rollout.val_kwargs.n=8", "evaluation"),
}
"""Functions that read the key=value after their name themselves: an example, and a page of the documentation."""


@command("config keys", "valor config keys temperature", "configuration")
@click.argument("words", nargs=-1, metavar="[PREFIX or WORD …]")
@option("--of", type=click.Choice(list(RUNS)), help="The keys of this command alone.")
def config_keys(words: tuple[str, ...], of: str | None) -> int:
    """Print keys with type, default and meaning: those below PREFIX, or those whose name or meaning has every WORD.

    The keys of `valor ppo` come first; under each other command are those that differ from them.
    """
    from valor.config import describe_commands, describe_keys
    from valor.config.presets import COMMANDS as TREES

    print(describe_commands(*words) if of is None else describe_keys(*words, root=TREES[of]))
    return 0


@command("algorithms", "valor algorithms", "algorithms")
def algorithms() -> int:
    """Print the advantage estimators and losses, and what each needs."""
    from valor.algorithms import describe_algorithms

    print(describe_algorithms())
    return 0


@command("export", "valor export checkpoints/valor/run/global_step_100 my-model", "quickstart")
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@option("--role", default="actor", help="actor, critic, critic_2, … or reward_model.")
def export(checkpoint: Path, out: Path, role: str) -> int:
    """Write a role of CHECKPOINT, a global_step_N folder, as a plain Hugging Face directory."""
    from valor.trainer.export import export_checkpoint

    export_checkpoint(checkpoint, out, role)
    print(out)
    return 0


@command("report", "valor report checkpoints/valor/run", "metrics")
@click.argument("run_dir", type=PATH)
def report(run_dir: Path) -> int:
    """Build (again) the report of a run, finished or not."""
    from valor.report.page import build_report

    print(build_report(run_dir))
    return 0


class Commands(click.Group):
    """The commands of the table whose names begin with `prefix`, by their next word."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(prefix.strip() or "valor", epilog=f"More: {PAGES}/", no_args_is_help=False)
        self.prefix, self.names = prefix, [name for name in COMMANDS if name.startswith(prefix)]
        if not prefix:
            click.version_option(__version__, message="valor %(version)s")(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys(name.removeprefix(self.prefix).partition(" ")[0] for name in self.names))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.prefix + cmd_name
        if name not in COMMANDS:
            return Commands(f"{name} ") if any(other.startswith(f"{name} ") for other in COMMANDS) else None
        target, about = COMMANDS[name]
        if name not in RUNS:
            return resolve_name(target)
        from valor.config.command_line import LINE

        example, page = RUNS[name]
        text = f"{about}\n\n+ or ++ before a key changes nothing, ~key restores its default; `valor config keys`."
        decorate = command(name, f"valor {name} {example}", page, cls=RunCommand, params=LINE.params, help=text)
        return decorate(resolve_name(target))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.names])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        chosen = self.get_command(ctx, args[0])
        if chosen is None:
            near = did_you_mean(args[0], self.list_commands(ctx))
            there = ", ".join(name.removeprefix(self.prefix) for name in self.names)
            raise UserError(f"{ctx.command_path}: there is no command '{args[0]}'{near}; there are: {there}")
        return args[0], chosen, args[1:]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and self.prefix:
            raise UserError(f"{ctx.command_path}: say which: {', '.join(f'valor {name}' for name in self.names)}")
        return super().parse_args(ctx, args or ["--help"])


class RunCommand(Command):
    """A command that reads its words itself: the key=value of a run, and Hydra's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or {"-h", "--help"} & {*args}:  # a shell completes a word, or help is asked for
            return super().parse_args(ctx, args)
        ctx.params["argv"] = args
        return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 2 with one clear line for a mistake of the user's."""
    words = list(sys.argv[1:] if argv is None else argv)
    if instruction := os.environ.get("_VALOR_COMPLETE"):  # a shell's completion: docs/installation.md
        return shell_complete(Commands(), {}, "valor", "_VALOR_COMPLETE", instruction)
    words = ["--help"] if words == ["help"] else words
    return exit_code(lambda: disk_errors(Path())(run)(Commands(), words, "valor"))
