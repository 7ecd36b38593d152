"""`valor plan`, `valor serve`, `valor chat` and `valor eval`, whose settings are checked before torch is imported."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from valor.agents.http_server import address_options, key_for, require_libraries
from valor.arguments import PATH, command, option
from valor.config import EvalConfig, PPOConfig
from valor.config.command_line import overrides, read_arguments
from valor.errors import UserError
from valor.trainer.command import load_checked, run_command, trains

_READS = ("actor_rollout_ref.", "data.", "trainer.")  # sections that say how a model is loaded, sampled from and placed


@command("plan", "valor plan --gpus 8 --memory 80 actor_rollout_ref.model.path=MODEL", "memory", passes_options=True)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]…")
@option("--gpus", type=click.IntRange(1), help="GPUs of a node that is not here; else this machine.")
@option("--nodes", type=click.IntRange(1), help="Nodes of these (else trainer.nnodes).")
@option("--memory", type=click.FloatRange(0, min_open=True), help="GiB of each GPU (else 80), or of each process here.")
def plan(settings: tuple[str, ...], gpus: int | None, nodes: int | None, memory: float | None) -> int:
    """Memory of valor ppo by role and phase, before anything is loaded.

    The exit code is 1 where the run does not fit.
    """
    config = load_checked(settings, PPOConfig).config
    from valor.lab.planner import run

    return run(config, settings, gpus, nodes, memory)


@command("serve", "valor serve runs/demo/ppo/huggingface/actor --record episodes", "agents", passes_options=True)
@click.argument("model")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]…")
@address_options
@option("--record", type=PATH, metavar="DIR", help="Write each session's episode there.")
def serve(
    model: str, settings: tuple[str, ...], port: int, host: str, api_key_env: str | None, record: Path | None
) -> int:
    """Serve a model as `valor ppo` would sample from it, by an OpenAI-compatible address, until a signal ends it.

    MODEL: a Hugging Face directory (valor export makes one) or hub name. KEY=VALUE are keys of `valor ppo`, and
    --config-path RUN --config-name config takes over those of a run.
    """
    api_key = key_for(host, api_key_env)
    require_libraries()
    config = _config(model, list(settings), "serve", {})
    from valor.lab.serve import run

    return run(config, model, port, host, api_key, record)


@command("chat", "valor chat runs/demo/ppo/huggingface/actor", "evaluation", passes_options=True)
@click.argument("model")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]…")
@option(
    "--critic", metavar="DIR", help="A critic whose value of each answer is shown (else the one that belongs to MODEL)."
)
@option("--system", metavar="TEXT", help="A system message before the first line.")
def chat(model: str, settings: tuple[str, ...], critic: str | None, system: str | None) -> int:
    """Talk to a model, a line each, sampled as `valor ppo` would, with the critic's value beside each answer.

    MODEL: a Hugging Face directory, a hub name, or a checkpoint (global_step_N). Its critic is that of the
    checkpoint, or `critic` beside a directory `actor`. KEY=VALUE as of valor serve.
    """
    from valor.lab.chat import exported, run, temporary

    _without_dash(model, "chat")
    with temporary(model) as folder:
        policy, critic = exported(model, critic, Path(folder))
        values = {} if critic is None else {"critic.enable": True, "critic.model.path": critic, "critic.freeze": True}
        return run(_config(policy, list(settings), "chat", values), critic, system)


def evaluate(argv: Sequence[str] | None = None) -> int:
    """MODEL… and key=value; the first model is `actor_rollout_ref.model.path`, the others are compared with it."""
    words = list(sys.argv[1:] if argv is None else argv)
    typed = shlex.join(["valor", "eval", *words])
    models = list[str]()
    with suppress(UserError):  # `run_command` says what is wrong
        models = [word for word in read_arguments(words).overrides if "=" not in word and word[:1] not in "-~"]
    for model in models:
        words.remove(model)
    settings = {"actor_rollout_ref.model.path": models[0]} if models else {}
    settings |= {"eval.others": models[1:]} if len(models) > 1 else {}
    run = trains("valor.lab.evaluation:EvalRun")
    return run_command(
        "eval", EvalConfig, lambda config, _: run(config, typed), [*overrides(EvalConfig, settings), *words]
    )


def _without_dash(model: str, name: str) -> None:
    if model.startswith("-"):
        raise UserError(f"valor {name} has no option '{model}'; see valor {name} --help")


def _config(model: str, settings: list[str], name: str, more: Mapping[str, Any]) -> PPOConfig:
    """The tree of `valor NAME MODEL`. UserError: a setting that is none, or that changes nothing here."""
    _without_dash(model, name)
    process = {"trainer.controller": "local", "trainer.n_gpus_per_node": 1}
    fixed = overrides(PPOConfig, {"actor_rollout_ref.model.path": model, **more, **process})
    typed = [setting.lstrip("+") for setting in settings if "=" in setting and not setting.startswith("-")]
    if unread := [setting for setting in typed if not setting.startswith(_READS)]:
        sections = ", ".join(f"{section}*" for section in _READS)
        raise UserError(f"{unread[0]}: valor {name} reads {sections}: leave it out")
    loaded = load_checked([*fixed, *settings], PPOConfig)
    if loaded.dry_run:
        raise UserError(f"valor {name} has no --dry-run: leave it out")
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    return loaded.config
