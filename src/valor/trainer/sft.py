"""Supervised fine-tuning: the policy learns the assistant's tokens of given chats, on the engine and batch of PPO."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from valor import algorithms
from valor.config import SFTConfig, TrainerConfig, dump_yaml
from valor.controller import WorkerGroup, resolve_pool, start_group
from valor.data.batch import Batch
from valor.data.sampler import PromptSampler
from valor.engines.sharding import DTYPES
from valor.models.load import load_policy, load_tokenizer
from valor.models.policy import PolicyModel
from valor.models.rows import compact_rows
from valor.models.token_log_probs import log_probs_from_logits
from valor.tracking.console import format_number, format_seconds, get_console
from valor.tracking.loggers import RunInfo, Tracker
from valor.tracking.metrics import Timer
from valor.tracking.progress import part, phase
from valor.tracking.progress_console import show_progress
from valor.tracking.rundir import write_atomically, write_run_info
from valor.trainer.checkpoints import CheckpointStore
from valor.trainer.demonstrations import DemonstrationDataset
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.signals import StopRequest
from valor.trainer.stopped import TrainingStopped
from valor.workers.dispatch import dispatch
from valor.workers.host import RoleSpec, WorkerContext
from valor.workers.model_role import ModelRole
from valor.workers.reduction import sum_over_ranks

ROLE = "actor"  # the policy's name in checkpoints and exports, as in a PPO run
_CONSOLE_LINES = 20  # of a whole run: its steps are short
_BLOCK_ELEMENTS = 2**24  # logits looked at together when hits are counted


class ImitatingPolicy(PolicyModel):
    """A policy that can also say at which response tokens it would have made the same choice greedily."""

    def __init__(self, policy: PolicyModel) -> None:
        nn.Module.__init__(self)
        self.hf, self.logit_map = policy.hf, policy.logit_map

    def forward(self, rows: Mapping[str, Tensor], *, with_hits: bool = False, **options: Any) -> dict[str, Tensor]:
        """As PolicyModel; `with_hits` (no gradients) adds `hits` [b, T]: 1 where the token is the likeliest one."""
        if not with_hits:
            return super().forward(rows, **options)
        compact = compact_rows(rows)
        if self.logit_map is None:
            logits = compact.gather(self.hf(input_ids=compact.input_ids, use_cache=False).logits)
            blocks = [(logits, compact.targets)]
        else:
            states = compact.gather(self.hf.base_model(input_ids=compact.input_ids, use_cache=False).last_hidden_state)
            head = self.hf.get_output_embeddings()
            size = max(1, _BLOCK_ELEMENTS // len(head.weight))
            pairs = zip(states.split(size), compact.targets.split(size), strict=True)
            blocks = ((self.logit_map.apply_(head(s).float()), t) for s, t in pairs)
        found = [(log_probs_from_logits(logits, t)[0], (logits.argmax(-1) == t).float()) for logits, t in blocks]
        log_probs, hits = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"log_probs": compact.scatter(log_probs), "hits": compact.scatter(hits)}


class SFTWorker(ModelRole):
    """One rank of the policy under supervised training."""

    def __init__(self, context: WorkerContext, *, config: SFTConfig, total_steps: int) -> None:
        self._limits = {
            "max_tokens": config.data.max_token_len_per_gpu,
            "max_rows": config.data.micro_batch_size_per_gpu,
        }
        super().__init__(
            context,
            ImitatingPolicy(load_policy(config.model, dtype=DTYPES[config.fsdp_config.model_dtype])),
            fsdp=config.fsdp_config,
            optim=config.optim,
            checkpoint=config.checkpoint,
            total_steps=total_steps,
        )

    @dispatch("dp")
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; `loss` is the mean over the tokens that count, over all ranks."""
        with self.on_device(optimizer=True) as engine:
            metrics = engine.forward_backward(batch, token_loss, **self._limits)
            return sum_over_ranks(metrics) | engine.optimizer_step()

    @dispatch("dp")
    def evaluate(self, batch: Batch) -> dict[str, float]:
        """`loss` and `token_accuracy` (greedy, given the demonstration so far), means over the tokens that count."""
        with self.on_device() as engine:
            out = engine.forward(batch, **self._limits, with_hits=True)
        mask, count = batch["response_mask"], batch.meta["num_tokens"]
        return sum_over_ranks(
            {
                "loss": float(-(out["log_probs"] * mask).sum() / count),
                "token_accuracy": float((out["hits"] * mask).sum() / count),
            }
        )


def token_loss(outputs: Mapping[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """These rows' share of -mean log-prob over the tokens that count in the whole batch."""
    loss = algorithms.aggregate_loss(
        -outputs["log_probs"], rows["response_mask"], mode="token-mean", denominator=rows.meta["num_tokens"]
    )
    return loss, {"loss": loss.detach()}


class SFTTrainer:
    """The loop: a shuffled batch, an optimizer step; validation, checkpoints and a Hugging Face directory at the end.

    Raises UserError for bad input when it is made; nothing has been written then.
    """

    group: WorkerGroup

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        trainer, data, model = config.trainer, config.data, config.model
        self.pool, self.controller = resolve_pool(
            TrainerConfig(**trainer.model_dump(include={"device", "n_gpus_per_node", "num_threads"}))
        )
        self.tokenizer = load_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            require_chat_template=True,
        )
        self.train = DemonstrationDataset(data, self.tokenizer, "train", trainer.seed)
        self.val = DemonstrationDataset(data, self.tokenizer, "val", trainer.seed) if data.val_files else None
        self.sampler = PromptSampler(len(self.train), data.train_batch_size, seed=trainer.seed, shuffle=data.shuffle)
        self.total_steps = trainer.total_training_steps or self.sampler.steps_per_epoch * trainer.total_epochs
        self.run_dir = Path(trainer.default_local_dir).expanduser()
        self.checkpoints = CheckpointStore(self.run_dir, trainer.max_ckpt_to_keep)
        self.step = 0
        self.skipped_in_a_row = 0

    def fit(self) -> int:
        """Run to the last step. Returns 0, or 128 + n when signal n asked to stop (progress is saved)."""
        trainer = self.config.trainer
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            spec = RoleSpec(SFTWorker, {"config": self.config, "total_steps": self.total_steps})
            self.group = start_group(self.pool, {ROLE: spec}, controller=self.controller)
            stack.callback(self.group.close)
            self._resume()
            tracker = stack.enter_context(self._recording())
            stack.enter_context(show_progress(get_console()))
            stack.enter_context(phase("supervised training", self.total_steps, unit="step"))
            while self.step < self.total_steps and stop.signum is None:
                with part(self.step, self.total_steps):
                    metrics = self.train_step()
                self.step += 1
                last = self.step == self.total_steps
                if last or _due(self.step, trainer.test_freq):
                    metrics |= self.validate()
                if last or stop.signum is not None or _due(self.step, trainer.save_freq):
                    self.checkpoints.save(self.step, self._state(), self._write_roles, keep=set())
                tracker.log(self.step, metrics)
                self._print(metrics, last)
            if self.step >= self.total_steps:
                self.export()
        return 0 if stop.signum is None else 128 + stop.signum

    def train_step(self) -> dict[str, float]:
        """One optimizer step on the next batch; its metrics."""
        timer = Timer()
        with timer("step"):
            batch = self.train.batch(self.sampler.next_batch())
            metrics = self.group[ROLE].update(batch)
        self._watch_skips(metrics)
        tokens = int((batch["prompt_lengths"] + batch["response_lengths"]).sum())
        return {f"train/{name}": value for name, value in metrics.items()} | {
            "train/tokens": batch.meta["num_tokens"],
            "timing_s/step": timer.seconds["step"],
            "perf/throughput": tokens / timer.seconds["step"] / self.pool.world_size,
            "training/epoch": self.sampler.epoch,
            "training/global_step": self.step + 1,
        }

    def validate(self) -> dict[str, float]:
        """`val/loss` and `val/token_accuracy` over all validation samples; nothing where there are none."""
        if self.val is None:
            return {}
        with phase("validation", len(self.val), unit="sample"):
            metrics = self.group[ROLE].evaluate(self.val.batch(range(len(self.val))))
        return {f"val/{name}": value for name, value in metrics.items()}

    @property
    def export_dir(self) -> Path:
        """Where the trained model lies when the run has ended."""
        return self.run_dir / "huggingface" / ROLE

    def export(self) -> None:
        """The trained model and its tokenizer as a plain Hugging Face directory."""
        self.group[ROLE].export(self.export_dir)
        self.tokenizer.save_pretrained(self.export_dir)
        get_console().print(f"model saved as a Hugging Face model: {self.export_dir}", markup=False)

    def _recording(self) -> Tracker:
        trainer = self.config.trainer
        info = RunInfo(
            run_dir=self.run_dir,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            config=self.config.model_dump(mode="json"),
            total_steps=self.total_steps,
            resume_step=self.step or None,
        )
        # The console's line per step is made for runs whose steps are long; `_print` speaks instead.
        tracker = Tracker([name for name in trainer.logger if name != "console"], info)
        write_atomically(self.run_dir / "config.yaml", dump_yaml(self.config))
        versions = {package: version(package) for package in ("torch", "transformers")}
        write_run_info(
            self.run_dir,
            name=trainer.experiment_name,
            command=" ".join(sys.argv),
            versions=versions | {"python": platform.python_version()},
        )
        return tracker

    def _print(self, metrics: Mapping[str, float], last: bool) -> None:
        every = max(1, self.total_steps // _CONSOLE_LINES)
        if "console" not in self.config.trainer.logger or not (last or _due(self.step, every) or "val/loss" in metrics):
            return
        names = {"train/loss": "loss", "train/lr": "lr", "val/loss": "val loss", "val/token_accuracy": "val accuracy"}
        numbers = "  ".join(f"{label} {format_number(metrics[key])}" for key, label in names.items() if key in metrics)
        seconds = format_seconds(metrics["timing_s/step"])
        get_console().print(f"step {self.step}/{self.total_steps}  {numbers}  {seconds} a step", markup=False)

    def _watch_skips(self, metrics: Mapping[str, float]) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics["skipped"] else 0
        if self.skipped_in_a_row >= self.config.trainer.max_skipped_updates:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} updates in a row had non-finite gradients (last: step {self.step + 1}): "
                "lower optim.lr, or resume from the last checkpoint"
            )

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def _write_roles(self, folder: Path) -> None:
        self.group[ROLE].save(folder / ROLE)
        self.tokenizer.save_pretrained(folder / TOKENIZER_DIR)

    def _resume(self) -> None:
        trainer = self.config.trainer
        folder = self.checkpoints.resume_folder(trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            return
        state = self.checkpoints.load_state(folder)
        self.group[ROLE].load(folder / ROLE)
        self.step, self.skipped_in_a_row = state["step"], state["skipped_in_a_row"]
        self.sampler.load_state_dict(state["sampler"])
        get_console().print(f"resumed from {folder} after step {self.step}", markup=False)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
