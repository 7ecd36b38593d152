"""`valor eval`: how well policies answer the prompts of files, with intervals, and whether one is better than another.

A folder for each policy holds its answers, written some prompts at a time: a command that was stopped goes on there.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

from valor.collector.inputs import RunInputs
from valor.collector.rollouts import policy_group, rollout_records, write_rollouts
from valor.config import EvalConfig, held_out, inert_settings
from valor.data.balance import grouped
from valor.data.batch import Episodes
from valor.data.files import read_records
from valor.errors import UserError
from valor.lab.statistics import bootstrap_interval, sign_flip_p
from valor.report.eval_page import comparison_table, eval_page, metric_table
from valor.tracking.console import say
from valor.tracking.rundir import disk_errors, locked, write_atomically
from valor.trainer.changes import changes, digests_of, settings_of
from valor.trainer.checkpoints import MANIFEST_FILE
from valor.trainer.checks import placed
from valor.trainer.export import export_checkpoint
from valor.trainer.validation import Graded, prompt_metrics

_AT_ONCE = 1024  # answers between two writes
_SETTINGS_FILE = "settings.json"
_HARMLESS_SECTIONS = ("eval.", "trainer.default_local_dir")
_NOT_IN_NAMES = ("actor", "huggingface")
_MARKDOWN_FILE, _NUMBERS_FILE, _PAGE_FILE = "eval.md", "eval.json", "eval.html"


class EvalRun:
    """One evaluation."""

    def __init__(self, config: EvalConfig, command: str) -> None:
        self.config, self.command, self.placement = config, command, placed(config)

    def fit(self) -> int:
        """Answer, grade, and write numbers, table and page to `eval.out`."""
        config, out = self.config, Path(self.config.eval.out)
        sampling = config.actor_rollout_ref.rollout.val_kwargs
        with disk_errors(out), locked(out, say):
            policies = list(_policies(config, out))
            for policy in policies:  # what is wrong with one is said before any answers
                policy.check()
            for policy in policies:
                policy.answer()
            results = {
                "command": self.command,
                "data": config.data.val_files,
                "samples": sampling.n,
                "temperature": sampling.effective_temperature,
                "seed": config.trainer.seed,
                "policies": [policy.measured() for policy in policies],
                "comparisons": list(_comparisons(policies)),
            }
            write_atomically(out / _NUMBERS_FILE, json.dumps(results, indent=1, allow_nan=False) + "\n")
            write_atomically(out / _PAGE_FILE, eval_page(results))
            text = _markdown(results)
            write_atomically(out / _MARKDOWN_FILE, text)
        say(text)
        say(str(out / _PAGE_FILE))
        return 0


class _Policy:
    """One policy: its tree, and its folder of answers. A checkpoint is exported there before it answers."""

    def __init__(self, config: EvalConfig, name: str, folder: Path) -> None:
        self.config, self.name, self.folder = config, name, folder
        self.source = config.actor_rollout_ref.model.path

    def check(self) -> None:
        """UserError: the model or the data cannot be read, or the folder has answers under other settings."""
        self._check_settings()
        if (Path(self.source) / MANIFEST_FILE).exists():
            exported = self.folder / "model"
            if not exported.exists():
                partial = self.folder / "model.partial"
                shutil.rmtree(partial, ignore_errors=True)
                export_checkpoint(Path(self.source), partial, "actor")
                partial.rename(exported)
            self.config = _with_model(self.config, str(exported))
        with closing(self._inputs()):
            pass

    def _check_settings(self) -> None:
        """Remember the settings, and the content of the model and the data; or compare them."""
        inert = inert_settings(self.config, settings_of(self.config))
        settings = {key: value for key, value in settings_of(self.config).items() if key not in inert}
        settings = {key: value for key, value in settings.items() if not key.startswith(_HARMLESS_SECTIONS)}
        now = {"settings": settings, "digests": {k: v for k, v in digests_of(self.config).items() if k in settings}}
        file = self.folder / _SETTINGS_FILE
        if file.exists():
            before = json.loads(file.read_text())
            lines = [change.line for change in changes(EvalConfig, before, now) if not change.exact]
            if lines and self._answer_files:
                raise UserError(
                    f"'{self.folder}' holds answers under other settings ({'; '.join(lines)}): give another eval.out, "
                    "or delete it"
                )
            if not lines:
                return
        shutil.rmtree(self.folder / "model", ignore_errors=True)  # the export of another checkpoint
        write_atomically(file, json.dumps(now, indent=1) + "\n")

    @property
    def _answer_files(self) -> list[Path]:
        return sorted(self.folder.glob("answers_*.jsonl"))

    def _inputs(self) -> RunInputs:
        return RunInputs(held_out(self.config))

    def answer(self) -> None:
        """Answers to the prompts that have none in the folder yet."""
        with closing(self._inputs()) as inputs:
            prompts, n = list(inputs.train), self.config.actor_rollout_ref.rollout.val_kwargs.n
            size = max(1, _AT_ONCE // n)
            files = {first: self.folder / f"answers_{first:07d}.jsonl" for first in range(0, len(prompts), size)}
            missing = [first for first, file in files.items() if not file.exists()]
            if len(missing) < len(files):
                say(f"{self.name}: {len(files) - len(missing)} of {len(files)} files of answers are there")
            if not missing:
                return
            with policy_group(held_out(self.config), inputs, placed(self.config), say) as collector:
                for first in missing:
                    batch, results = collector.validation_batch(0, prompts[first : first + size], first)
                    pairs = zip(results, Episodes(batch).rows, strict=True)
                    verdicts_by_row = [verdict for verdict, rows in pairs for _ in rows]
                    records = rollout_records(batch, [v.score for v in verdicts_by_row], 0, inputs.tokenizer)
                    verdicts = (
                        {"correct": v.correct, "answer": v.components.get("pred"), "error": v.error}
                        for v in verdicts_by_row
                    )
                    rows = (record | verdict for record, verdict in zip(records, verdicts, strict=True))
                    write_rollouts(files[first], rows)

    @cached_property
    def answers(self) -> list[Mapping[str, Any]]:
        """One record a sample, the samples of a prompt together; of an episode of several rows the last, with the
        policy's tokens of all as `tokens`."""
        records = [r for file in self._answer_files for _, r in read_records(str(file))]
        episodes = grouped(records, [r.get("episode", i) for i, r in enumerate(records)])
        return [rows[-1] | {"tokens": sum(sum(row["response_mask"]) for row in rows)} for rows in episodes]

    @cached_property
    def by_prompt(self) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Of each data source, each metric of each prompt."""
        return prompt_metrics([Graded(*map(answer.__getitem__, Graded._fields)) for answer in self.answers])

    @cached_property
    def scores(self) -> Mapping[tuple[str, str], float]:
        """The mean score of the answers to each prompt, by data source and row of the data (as uids end)."""
        keys = [(answer["data_source"], answer["uid"].rpartition(":")[2]) for answer in self.answers]
        scores = grouped([answer["score"] for answer in self.answers], keys)
        return dict(zip(dict.fromkeys(keys), map(_mean, scores), strict=True))

    def measured(self) -> dict[str, Any]:
        """Of each data source: prompts, the mean length and share of answers that were cut, how many could not be
        graded, and each metric's mean with its interval over prompts."""
        sources = {}
        for source, metrics in self.by_prompt.items():
            answers = [answer for answer in self.answers if answer["data_source"] == source]
            sources[source] = {
                "prompts": len(next(iter(metrics.values()))),
                "tokens": _mean([answer["tokens"] for answer in answers]),
                "cut": _mean([answer["finish_reason"] == "length" for answer in answers]),
                "errors": sum(answer["error"] is not None for answer in answers),
                "metrics": {name: _estimate(values) for name, values in metrics.items()},
            }
        return {"name": self.name, "path": self.source, "sources": sources}


def _policies(config: EvalConfig, out: Path) -> Iterator[_Policy]:
    """Each model with a name that no other has."""
    names = set[str]()
    trees = [config, *(_with_model(config, path) for path in config.eval.others or [])]
    for tree in trees:
        path = tree.actor_rollout_ref.model.path
        parts = [part for part in Path(os.path.abspath(path)).parts if part not in _NOT_IN_NAMES and part != "/"]
        stem = parts[-1] if parts else path
        numbered = (f"{stem}-{number}" for number in count(2))
        name = next(name for name in chain([stem], numbered) if name not in names)
        names.add(name)
        yield _Policy(tree, name, out / name)


def _with_model(config: EvalConfig, path: str) -> EvalConfig:
    """The tree of another policy, which has no adapters; a tokenizer that was the model's own follows."""
    model = config.actor_rollout_ref.model
    paths = {"path": path, "lora_rank": 0, "lora_adapter_path": None} | (
        {"tokenizer_path": path} if model.tokenizer_path == model.path else {}
    )
    policy = config.actor_rollout_ref.model_copy(update={"model": model.model_copy(update=paths)})
    return config.model_copy(update={"actor_rollout_ref": policy})


def _comparisons(policies: Sequence[_Policy]) -> Iterator[dict[str, Any]]:
    """Each further policy against the first: mean over the prompts that both answered (others are too long in the
    tokens of one of them) of the difference of their mean scores."""
    base = policies[0]
    for other in policies[1:]:
        theirs = other.scores
        for source, metrics in base.by_prompt.items():
            ours = {key: score for key, score in base.scores.items() if key[0] == source}
            gaps = [theirs[key] - score for key, score in ours.items() if key in theirs]
            if len(gaps) < max(len(ours), sum(key[0] == source for key in theirs)):
                say(f"{other.name}: compared on the {len(gaps)} prompts of {source} that {base.name} answered too")
            if not gaps:
                continue
            yield {
                "base": base.name,
                "other": other.name,
                "source": source,
                "metric": next(iter(metrics)),
                **_estimate(gaps),
                "p_signs": sign_flip_p(gaps),
                "better": sum(gap > 0 for gap in gaps),
                "worse": sum(gap < 0 for gap in gaps),
                "prompts": len(gaps),
            }


def _estimate(values: Sequence[float]) -> dict[str, float | None]:
    low, high = bootstrap_interval(values) or (None, None)
    return {"value": _mean(values), "low": low, "high": high}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _markdown(results: Mapping[str, Any]) -> str:
    tables = [metric_table(results), *([comparison_table(results)] if results["comparisons"] else [])]
    lines = [f"# Evaluation\n\n`{results['command']}`"]
    for heads, rows in tables:
        cells = ((cell.replace("|", "\\|") for cell in row) for row in (heads, ["---"] * len(heads), *rows))
        lines.append("\n".join("| " + " | ".join(row) + " |" for row in cells))
    return "\n\n".join(lines) + "\n"
