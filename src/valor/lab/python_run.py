"""A run of a Python session: made from what was given, taken step by step, looked at.

The configuration, the folder and the checkpoints are those of the command line: what is given as an object becomes a
file in the run's folder, so the command that `run.command` shows does the same.
"""

import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self

from valor.config import PPOConfig, SupervisedConfig, load
from valor.config.command_line import overrides
from valor.errors import Interrupted, UserError
from valor.lab.given import Given, Row, files_of, given_bytes, given_model, given_rows, rows_of
from valor.trainer.command import tell_notes

_INPUTS = "inputs"  # in the folder of the run


class PythonRun(AbstractContextManager["PythonRun"], Iterator[dict[str, Any]]):
    """A training run. `train()` does all of it; a `for` loop over it takes a step at a time; `close()` ends it early.

    model: a path, a hub name or a loaded transformers model (with its `tokenizer`). train_data, val_data: files, a data
    set, or a list of dicts. config: a yaml file or a named configuration to start from. settings: keys of the command
    line, with `.` or `__` between their parts, or the end of one key alone; `None` is null.

    `metrics`: of each step so far in this process, with those of the validation before the first.
    """

    words: ClassVar[str]  # of the command
    root: ClassVar[type[PPOConfig] | type[SupervisedConfig]]
    _make: ClassVar[Callable[..., Any]]  # a valor.trainer.run.Run of the configuration and the command
    model_key: ClassVar[str] = "model"

    def __init__(
        self,
        model: Any = None,
        train_data: Any = None,
        *,
        val_data: Any = None,
        tokenizer: Any = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self._files: dict[str, Given] = {}
        self._settings: dict[str, Any] = {}
        self._give_model(self.model_key, model, tokenizer)
        self._give_rows("train", train_data)
        self._give_rows("val", val_data)
        self._give_more()
        self._settings |= settings
        self._options = _options(config)
        # Where the folder is has to be known before anything can be written into it.
        self.folder = Path(load(self._arguments(Path(_INPUTS)), self.root).config.trainer.default_local_dir)
        self._inputs = (self.folder / _INPUTS).absolute()
        for given in self._files.values():
            given.into(self._inputs)
        arguments = self._arguments(self._inputs)
        from valor.trainer.checks import check  # after the mistakes that are told without torch

        loaded = load(arguments, self.root, check)
        tell_notes(loaded)
        self.config: Any = loaded.config
        self.command = shlex.join(["valor", *self.words.split(), *arguments])
        self._explicit_keys = loaded.explicit_keys
        self.metrics: list[dict[str, Any]] = []
        self._run: Any = None  # the run that is under way
        self._steps: Any = None
        self._ended = False

    def train(self) -> Self:
        """All steps that are left. KeyboardInterrupt when a signal asked to stop: the run has been saved then."""
        while self._advance() is not None:
            pass
        return self

    def __next__(self) -> dict[str, Any]:
        """One step; its metrics."""
        metrics = self._advance()
        if metrics is None:
            raise StopIteration
        self._run.stop.at_once = True  # who stands between two steps has nothing to finish
        return metrics

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Metrics of the present weights on `data` (default: the validation data), before, in or after training."""
        files = self.config.data.val_files if data is None else self._given("evaluation", data)
        if not files:
            raise UserError("there is nothing to evaluate on: give val_data to the run, or data to evaluate")
        self._open()
        try:
            return self._run.evaluate([str(files.into(self._inputs))] if isinstance(files, Given) else files)
        finally:
            if self._ended:
                self.close()

    def plan(self) -> str:
        """What the run does, in words and numbers."""
        from valor.trainer.plan import plan

        return plan(self.config, self._explicit_keys)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        from valor.models.load import load_tokenizer

        model = attrgetter(self.model_key)(self.config)
        return load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)

    def close(self) -> None:
        """End what runs. What was not saved is lost; the run goes on from its last checkpoint."""
        if self._steps is not None:
            self._steps.close()
        self._run = self._steps = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_more(self) -> None:  # only PPO is given more
        """What else was given becomes files and settings."""

    def _row(self, row: Row) -> Row:
        """A row as the files have it."""
        return row

    def _advance(self) -> dict[str, Any] | None:
        """The metrics of the next step, None after the last."""
        if self._ended:
            return None
        self._open()
        try:
            return self._next()
        except StopIteration as end:
            if end.value:
                raise Interrupted(end.value - 128) from None
            self._ended = True
            return None

    def _open(self) -> None:
        """Start the run, up to its first step, unless it is under way; one that has ended, as it ended."""
        from valor.trainer.run import steps_again

        if self._steps is not None:
            return

        def make() -> Any:
            self._run = type(self)._make(self.config, self.command)
            return self._run

        run = make()
        if self._ended:
            run.resume_from = run.record.checkpoints.path(self._last_step)
        self._steps = steps_again(run, make)
        self._next()
        self._run.stop.at_once = True

    def _next(self) -> dict[str, Any]:
        """The metrics of what the run yields next, kept."""
        try:
            metrics = next(self._steps)
        except BaseException:
            self._run = self._steps = None
            raise
        self._last_step = self._run.step
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        if numbers:
            self.metrics.append({"training/global_step": self._last_step, **numbers})
        return metrics

    def _loaded(self, role: str, kind: str) -> Any:
        """The role's present weights as a transformers model of the class `kind`, on the CPU."""
        import transformers

        from valor.models.hf import quiet_transformers

        folder = self.folder / "huggingface" / role
        under_way = self._run is not None
        if under_way:
            folder = self._inputs / f"{role}.now"
            self._run.roles[role].export(folder)
        elif not folder.is_dir():
            raise UserError(f"there is no {role} in '{self.folder}' yet: train first")
        with quiet_transformers():
            model = getattr(transformers, kind).from_pretrained(folder)
        if under_way:
            shutil.rmtree(folder)
        return model.eval()

    def _give_model(self, key: str, model: Any, tokenizer: Any = None) -> None:
        if isinstance(model, str | Path):
            self._settings[f"{key}.path"] = str(model)
            if tokenizer is not None:
                content = repr((sorted(tokenizer.get_vocab().items()), tokenizer.chat_template)).encode()
                name = given_bytes("tokenizer", "", content).name
                self._files[f"{key}.tokenizer_path"] = Given(name, tokenizer.save_pretrained)
        elif model is not None:
            self._files[f"{key}.path"] = given_model(model, tokenizer)
            named = getattr(model.config, "_name_or_path", "")
            if tokenizer is None and key == self.model_key:
                if not named:
                    raise UserError("a loaded model comes with its tokenizer: give tokenizer=")
                self._settings[f"{key}.tokenizer_path"] = named

    def _give_rows(self, split: str, data: Any) -> None:
        if data is not None:
            given = self._given(split, data)
            where: dict[str, Any] = self._files if isinstance(given, Given) else self._settings
            where[f"data.{split}_files"] = given

    def _given(self, name: str, data: Any) -> list[str] | Given:
        return files_of(data) or given_rows(name, map(self._row, rows_of(data, f"{name}_data")))

    def _arguments(self, inputs: Path) -> list[str]:
        files = {key: str(inputs / given.name) for key, given in self._files.items()}
        return [*self._options, *overrides(self.root, files | self._settings)]


def _options(config: str | Path | None) -> list[str]:
    if config is None:
        return []
    path = Path(config)
    own = path.suffix in (".yaml", ".yml")
    return [f"--config-path={path.parent}", f"--config-name={path.stem}"] if own else [f"--config-name={config}"]
