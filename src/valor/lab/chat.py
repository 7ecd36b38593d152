"""`valor chat MODEL`: talk to a policy in the terminal, with what a critic thinks of each answer."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from valor.agents.chat import Conversation
from valor.agents.episode import Episode
from valor.agents.loops import LoopContext, Play, Task
from valor.agents.runner import EpisodeRunner
from valor.collector.generation import sampling_params
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.lab.serve import beside_engine
from valor.models.load import check_critic, load_policy_tokenizer
from valor.trainer.checkpoints import MANIFEST_FILE
from valor.trainer.export import export_checkpoint
from valor.workers.host import WorkerHost

AGAIN = "/new"


def exported(model: str, critic: str | None, folder: Path) -> tuple[str, str | None]:
    """Hugging Face directories of policy and critic: those given, roles of a checkpoint `model` (written to `folder`),
    or the critic that a run has left beside its actor."""
    source = Path(model)
    if not (source / MANIFEST_FILE).exists():
        beside = source.with_name("critic") / "config.json"
        return model, critic or (str(beside.parent) if source.name == "actor" and beside.exists() else None)
    roles = ["actor", *(["critic"] if critic is None and (source / "critic").is_dir() else [])]
    for role in roles:
        export_checkpoint(source, folder / role, role)
    return str(folder / "actor"), str(folder / "critic") if "critic" in roles else critic


def temporary(model: str) -> Any:
    """A folder for what a checkpoint `model` is exported to, gone in the end."""
    return tempfile.TemporaryDirectory() if (Path(model) / MANIFEST_FILE).exists() else nullcontext("")


def run(config: PPOConfig, critic: str | None, system: str | None) -> int:
    """Answer the lines of standard input until it ends. `config.critic` is read where `critic` is given."""
    if critic is not None:
        check_critic(config, load_policy_tokenizer(config), trains=False)
    if sys.stdin is None:
        raise UserError(
            "valor chat reads lines from standard input, which is closed: give it a terminal, a pipe or a file"
        )
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes of another encoding are no reason to end
    if sys.stdin.isatty():
        print(f"{AGAIN} begins anew, Ctrl-D ends", flush=True)
    opening = [{"role": "system", "content": system}] if system else []

    async def talk(context: LoopContext, task: Task, runner: EpisodeRunner, host: WorkerHost) -> Episode:
        messages, lines = list(opening), _lines()
        number = 0
        while (line := await lines()) is not None:
            if line == AGAIN:
                messages = list(opening)
            if line in ("", AGAIN):
                continue
            messages.append({"role": "user", "content": line})
            said = Conversation(context.chat, messages)
            number += 1
            turn = Task((config.trainer.seed, 0, number), tuple(said.token_ids), sampling_params(config), {})
            play = Play(turn, runner.generate, context.limits, turn.prompt_ids)
            if play.room < 1:
                print(
                    f"[no room for an answer within {context.limits.model:,} tokens: {AGAIN} begins anew]", flush=True
                )
                messages.pop()
                continue
            output = await play.turn()
            messages.append({"role": "assistant", "content": said.answer(output)})
            print(messages[-1]["content"], flush=True)
            if critic is not None:
                values = _values(host, turn.prompt_ids, output.token_ids)
                print(f"[value {values[-1]:.3f} at the last token, {values[0]:.3f} before the first]", flush=True)
        return Episode((), (), "stop")

    beside_engine(config, talk, ["critic"] if critic is not None else [])
    return 0


def _values(host: WorkerHost, prompt: Any, answer: Any) -> list[float]:
    """The critic's value of the state before each token of an answer."""
    rows = {"prompts": prompt, "responses": answer}
    columns = {name: torch.tensor([list(ids)]) for name, ids in rows.items()}
    columns |= {f"{name[:-1]}_lengths": torch.tensor([len(ids)]) for name, ids in rows.items()}
    return host.call("critic", "compute_values", Batch(columns))["values"][0].tolist()


def _lines() -> Any:
    """A function to await the next line of standard input, or None at its end; a signal can end the waiting."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        try:
            for line in sys.stdin:
                loop.call_soon_threadsafe(queue.put_nowait, line.strip())
            loop.call_soon_threadsafe(queue.put_nowait, None)
        except RuntimeError:  # the loop has ended
            return

    Thread(target=read, daemon=True).start()
    return queue.get
