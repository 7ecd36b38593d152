"""Training from Python: `valor.train(...)`, `valor.PPO`, `valor.SFT`, `valor.RewardModel`.

Configuration, folder and checkpoints are those of the command line: objects become files in the run's folder, and the
command `run.command` repeats the run.
"""

import atexit
import gc
import shlex
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, cached_property, partial, wraps
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, cast

from valor.config import PPOConfig, RMConfig, SFTConfig, SupervisedConfig, load
from valor.config.command_line import overrides
from valor.errors import Interrupted, UserError
from valor.lab.given import InputFile, data_files, demonstration_row, file_of_bytes, model_settings, of_trl, prompt_row
from valor.report.run_data import read_steps
from valor.rewards.functions import RewardFunctions
from valor.tracking.rundir import METRICS_FILE, disk_errors
from valor.trainer.command import load_checked, tell_notes
from valor.user_files import pickled

_INPUTS = "inputs"  # in the folder of the run
P = ParamSpec("P")
_open_runs: "weakref.WeakSet[PythonRun]" = weakref.WeakSet()
Reward = Callable[..., Any] | Sequence[Callable[..., Any]]


def _with_trl_names(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """The same constructor, which takes TRL's names of its arguments too."""
    plain: Any = init

    @wraps(init)
    def renamed(self: Any, *args: P.args, **arguments: P.kwargs) -> None:
        plain(self, *args, **of_trl(arguments, self.model_key))

    return renamed


@contextmanager
def _torchs_own_defaults() -> Iterator[None]:
    """What the session has set for itself (a default type or device, no gradients) is no setting of a run."""
    import torch

    dtype, is_on_cpu = torch.get_default_dtype(), torch.get_default_device().type == "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        with nullcontext() if is_on_cpu else torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


class PythonRun(AbstractContextManager["PythonRun"], Iterator[dict[str, Any]]):
    """A training run. `train()` does all of it; a `for` loop over it takes a step at a time; `close()` ends it early.

    model: a path, a hub name or a loaded transformers model (with its `tokenizer`). train_data, val_data: files, a data
    set, or a list of dicts. config: a yaml file or a named configuration to start from. settings: keys of the command
    line, with `.` or `__` between their parts, or the end of one key alone; `None` is null. TRL's names of arguments
    and settings are understood, or answered with those here.

    `metrics`: of each step so far, those before a resume as metrics.jsonl has them; `metrics_before`: of the validation
    before the first.
    """

    words: ClassVar[str]  # of the command
    root: ClassVar[type[PPOConfig] | type[SupervisedConfig]]
    makes: ClassVar[str]  # a valor.trainer.run.Run of the configuration and the command, as `module:Class`
    model_key: ClassVar[str] = "model"
    _row: Callable[..., dict[str, Any]] = staticmethod(lambda row, data: row)  # as the files have it

    @_with_trl_names
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
        splits = {"train": train_data, "val": val_data}
        data = {f"data.{split}_files": (split, rows) for split, rows in splits.items() if rows is not None}
        inputs = model_settings(self.model_key, model, tokenizer, reads_text=True)
        inputs |= dict.fromkeys(data, _INPUTS) | settings

        def arguments(folder: Path) -> list[str]:
            paths = {key: str(folder / file.name) for key, file in inputs.items() if isinstance(file, InputFile)}
            return [*_options(config), *overrides(self.root, inputs | paths)]

        # The folder is a setting, as names of columns are: they are read once before the input files are written.
        first = load(arguments(Path(_INPUTS)), self.root).config
        row_of = partial(self._row, data=first.data)
        inputs |= {key: data_files(*rows, row_of) for key, rows in data.items()} | settings
        self.folder = Path(first.trainer.default_local_dir).absolute()
        self._inputs = self.folder / _INPUTS
        with disk_errors(self.folder):
            for file in (value for value in inputs.values() if isinstance(value, InputFile)):
                file.into(self._inputs)
        with _torchs_own_defaults():
            loaded = load_checked(arguments(self._inputs), self.root)
        tell_notes(loaded)
        # The session may leave the folder that it is in; the run's stays.
        trainer = loaded.config.trainer.model_copy(update={"default_local_dir": str(self.folder)})
        self.config: Any = loaded.config.model_copy(update={"trainer": trainer})
        self.command = shlex.join(["valor", *self.words.split(), *arguments(self._inputs)])
        self._explicit_keys = loaded.explicit_keys
        self.metrics: list[dict[str, Any]] = []
        self.metrics_before: dict[str, Any] = {}
        self._run: Any = None  # the run that is under way
        self._steps: Any = None
        self._ended = False

    def train(self) -> Self:
        """All steps that are left. KeyboardInterrupt when a signal asked to stop: the run has been saved then."""
        for _ in self:
            pass
        return self

    @_torchs_own_defaults()
    def __next__(self) -> dict[str, Any]:
        """One step; its metrics."""
        if self._ended:
            raise StopIteration
        self._open()
        try:
            metrics = self._next()
            self.metrics.append({"training/global_step": self._last_step, **_numbers(metrics)})
        except StopIteration as end:
            if end.value:
                raise Interrupted(end.value - 128) from None
            self._ended = True
            raise
        self._run.stop.at_once = True  # who stands between two steps has nothing to finish
        return metrics

    @_torchs_own_defaults()
    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Metrics of the present weights on `data` (default: the validation data), before, in or after training."""
        row_of = partial(self._row, data=self.config.data)
        files = self.config.data.val_files if data is None else data_files("evaluation", data, row_of)
        if not files:
            raise UserError("there is nothing to evaluate on: give val_data to the run, or data to evaluate")
        self._open()
        try:
            return self._run.evaluate([str(files.into(self._inputs))] if isinstance(files, InputFile) else files)
        finally:
            if self._ended:
                self.close()

    def plan(self) -> str:
        """What the run does, in words and numbers."""
        from valor.trainer.plan import plan

        return plan(self.config, self._explicit_keys)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, with its chat template."""
        from valor.models.load import load_model_tokenizer

        model, at = attrgetter(self.model_key)(self.config), getattr(self.config.data, "tokenizer", None)
        return load_model_tokenizer(model, at=at)

    def close(self) -> None:
        """End what runs. What was not saved is lost; the run goes on from its last checkpoint."""
        if self._steps is not None:
            self._steps.close()
        self._run = self._steps = None
        _open_runs.discard(self)
        gc.collect()  # its models are in cycles: the next run or the session needs their memory now

    @_torchs_own_defaults()
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """End what runs; `error` in a loop's body first saves the last complete step, as one in a step does."""
        if error is not None and self._steps is not None:
            with suppress(type(error), RuntimeError):  # StopIteration becomes one
                self._steps.throw(error)
            error.__traceback__ = traceback  # of the loop's body alone
        self.close()

    def _open(self) -> None:
        """Start the run, up to its first step, unless it is under way; one that has ended, as it ended."""
        if self._steps is None:
            self._run = run = resolve_name(self.makes)(self.config, self.command)
            if self._ended:
                run.resume_from = run.record.checkpoints.path(self._last_step)
            self._steps = run.steps()
            self.metrics_before = _numbers(self._next()) or self.metrics_before
            self._end_with_script()
            self.metrics = self._metrics_to(run.step)
            run.stop.at_once = True

    def _end_with_script(self) -> None:
        _open_runs.add(self)
        _save_at_errors()
        atexit.unregister(_end_open_runs)
        atexit.register(_end_open_runs)  # last, so that it is called before Ray's

    def _metrics_to(self, last: int) -> list[dict[str, Any]]:
        """Of each step up to `last`: as this process measured them, else as metrics.jsonl has them."""
        file, key = self.folder / METRICS_FILE, "training/global_step"
        lines = read_steps(file) if file.is_file() else {}
        known = {step: {key: step, **_numbers(line | {"step": None})} for step, line in lines.items()}
        known |= {metrics[key]: metrics for metrics in self.metrics}
        return [known[step] for step in sorted(known) if 0 < step <= last]

    def _next(self) -> dict[str, Any]:
        """The metrics of what the run yields next."""
        try:
            metrics = next(self._steps)
        except BaseException:
            self.close()
            raise
        self._last_step = self._run.step
        return metrics

    @_torchs_own_defaults()
    def _loaded(self, role: str, kind: str) -> Any:
        """The role's present weights as a transformers model of the class `kind`, on the CPU."""
        import transformers

        from valor.models.classifier import register_classifier
        from valor.models.hf import quiet_transformers

        folder, run = self.folder / "huggingface" / role, self._run
        if run is not None:
            folder = self._inputs / f"{role}.now"
            run.write_model(role, folder)
        elif not folder.is_dir():
            raise UserError(f"there is no {role} in '{self.folder}' yet: train first")
        auto: Any = getattr(transformers, kind)
        with quiet_transformers():
            if role != "actor":
                register_classifier(auto, transformers.AutoConfig.from_pretrained(folder), str(folder))
            model = auto.from_pretrained(folder)
        if run is not None:
            shutil.rmtree(folder)
        return model.eval()


@cache
def _save_at_errors() -> None:
    """An error that ends the script first ends its runs, which saves them; `atexit` would be too late for that."""
    report = sys.excepthook

    def end_runs(*error: Any) -> None:
        _end_open_runs(*error)
        report(*error)

    sys.excepthook = end_runs


def _end_open_runs(*error: Any) -> None:
    for run in list(_open_runs):
        run.__exit__(*(error or (None, None, None)))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _options(config: str | Path | None) -> list[str]:
    if not isinstance(config, str | Path | None):
        raise UserError("config: a yaml file, or the name of a configuration; settings are keywords")
    path = Path(config or "").expanduser()
    if path.suffix in (".yaml", ".yml"):
        return [f"--config-path={path.parent}", f"--config-name={path.stem}"]
    return [f"--config-name={config}"] if config else []


class PPO(PythonRun):
    """PPO with a critic, GRPO and their relatives.

    reward: a function that takes (data_source, solution_str, ground_truth, extra_info) or (completions, **columns), or
    several, whose scores are added with `reward_weights`; without one the built-in graders go by the rows' data_source.
    algorithm: ppo, grpo, dr_grpo, rloo, or the name of an advantage estimator.
    critic: where the critic starts, as `model`; default: there too.
    phases: a function (standard, config) that returns the list of phases of each step (docs/phases.md).
    """

    words, root, makes = "ppo", PPOConfig, "valor.trainer.ppo:PPORun"
    model_key = "actor_rollout_ref.model"
    _row = staticmethod(partial(prompt_row, keep_prompt=False))

    @_with_trl_names
    def __init__(
        self,
        model: Any = None,
        train_data: Any = None,
        *,
        reward: Reward | Mapping[str, Any] | None = None,
        reward_weights: Sequence[float] | None = None,
        algorithm: str | Mapping[str, Any] | None = None,
        critic: Any = None,
        phases: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> None:
        sections = {"reward": reward, "algorithm": algorithm, "critic": critic}
        settings: dict[str, Any] = {name: value for name, value in sections.items() if isinstance(value, Mapping)}
        if reward is not None and "reward" not in settings:
            several = reward if isinstance(reward, list | tuple) else [cast(Any, reward)]
            functions = RewardFunctions(several, reward_weights)
            self._row = partial(prompt_row, keep_prompt=functions.reads_prompts)
            settings["reward.custom_reward_function.path"] = file_of_bytes(
                "reward", ".pkl", pickled(functions, "reward", "reward.custom_reward_function.path")
            )
        elif reward_weights is not None:
            raise UserError("reward_weights are those of reward functions: give reward=[...]")
        if algorithm is not None and "algorithm" not in settings:
            settings["algorithm"] = str(algorithm)
        if phases is not None:
            settings["algorithm.phases_path"] = file_of_bytes(
                "phases", ".pkl", pickled(phases, "phases", "algorithm.phases_path")
            )
        if "critic" not in settings:
            settings |= model_settings("critic.model", critic)
        super().__init__(model, train_data, **settings | arguments)
        self._check_travels()

    @property
    def policy(self) -> Any:
        """The policy's present weights, a transformers model."""
        images = getattr(self.config.data, "image_key", None) is not None
        return self._loaded("actor", "AutoModelForImageTextToText" if images else "AutoModelForCausalLM")

    @property
    def critic(self) -> Any:
        """The critic's present weights: a token classifier whose logits are the values of what was read so far.
        UserError: the run has no such model."""
        if not self.config.has_value_model:
            has = "a regression (critic.kind=probe)" if self.config.has_probe else "no critic"
            raise UserError(f"run.critic: this run has {has} and no value model, as algorithm='ppo' trains one")
        return self._loaded("critic", "AutoModelForTokenClassification")

    def _check_travels(self) -> None:
        """UserError: processes of their own would not have something that was registered in this one."""
        from valor.algorithms import POLICY_LOSSES, VALUE_LOSSES
        from valor.controller.placement import resolve_placement

        config = self.config
        if config.trainer.node_rank is not None:
            raise UserError("trainer.node_rank is for the command line: from Python join a Ray cluster that runs")
        if config.algorithm.custom_path is not None or resolve_placement(config).controller == "local":
            return
        for name, losses in {config.policy_loss: POLICY_LOSSES, config.critic.value_loss: VALUE_LOSSES}.items():
            if not losses[name].builtin:
                raise UserError(
                    f"the loss '{name}' was registered in this process, and under Ray others train: put it into a file "
                    "and set algorithm.custom_path, or set trainer.controller=local"
                )


class SFT(PythonRun):
    """Supervised fine-tuning: rows with `messages`, or with a `prompt` and a `response` (or `completion`)."""

    words, root, makes, _row = "sft", SFTConfig, "valor.trainer.supervised:SFTRun", staticmethod(demonstration_row)
    policy = PPO.policy


class RewardModel(PythonRun):
    """A reward model from preference pairs: rows with `prompt`, `chosen` and `rejected`."""

    words, root, makes = "rm train", RMConfig, "valor.trainer.rm:RewardModelRun"

    @property
    def reward_model(self) -> Any:
        """Its present weights: a sequence classifier of one label."""
        return self._loaded("reward_model", "AutoModelForSequenceClassification")


def train(model: Any = None, train_data: Any = None, *, algorithm: Any = "ppo", **arguments: Any) -> PythonRun:
    """Train, and return the run. `algorithm`: `sft`, `reward_model`, or one of PPO's; the other arguments are those of
    SFT, RewardModel or PPO."""
    given = {name: value for name, value in {"model": model, "train_data": train_data}.items() if value is not None}
    if algorithm in ("sft", "reward_model"):
        return (SFT if algorithm == "sft" else RewardModel)(**given | arguments).train()
    return PPO(**given | arguments | {"algorithm": algorithm}).train()
