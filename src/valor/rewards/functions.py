"""Functions of a Python session as the grader of a run: in verl's form or in TRL's, several of them with weights."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from valor.errors import UserError
from valor.rewards.steps import Step, as_steps, scaled

FORMS = "(data_source, solution_str, ground_truth, extra_info), lists of these, or (completions, **columns)"
PROMPT = "prompt"
"""The entry of `extra_info` that has a row's prompt as it was given, for functions in TRL's form."""

_NOT_HERE = ("completion_ids", "trainer_state", "log_extra", "log_metric")  # which TRL's trainer passes
FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRANSCRIPT = "transcript"
_TAKEN = ("score", "step_rewards", "error", "mean", "correct")  # no names of components (docs/rewards.md)


class RewardFunctions:
    """One grader of several functions: the sum of their scores, each times its weight.

    A function in verl's form gets one sample. One in TRL's form gets lists: `completions` (texts, or messages where the
    prompt was messages), `prompts`, and the rows' other columns; it returns a list, in which None leaves the sample to
    the other functions. The lists have one sample, and a whole batch under `reward.reward_manager.name=batch`, which
    one in verl's form for batches needs. The score of each of several functions is a component under its name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self._functions = list(functions)
        if not functions:
            raise UserError("reward is an empty list: put functions into it, or leave it out")
        try:
            weights_or_ones = [1.0] * len(functions) if weights is None else weights
            self._weights = [float(weight) for weight, _ in zip(weights_or_ones, functions, strict=True)]
        except (TypeError, ValueError):
            raise UserError(f"reward_weights={weights}: give a list, with a number for each function") from None
        names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        self._names = [f"{name}_" if name in _TAKEN else name for name in names]
        if len(set(self._names)) < len(self._names):
            raise UserError(f"reward functions have the same name ({', '.join(self._names)}): set a __name__ of each")
        self._columns = [_columns_of(*pair) for pair in zip(functions, self._names, strict=True)]
        self.reads_prompts = any(columns is not None for columns in self._columns)  # rows have it in `extra_info` then
        self.needs = frozenset(n for f, c in zip(functions, self._columns, strict=True) if c for n in _needed(f))
        """The rows' columns that a function must be called with; one that a row lacks is None."""
        self.reads_truth = any(columns is None or "ground_truth" in columns for columns in self._columns)
        self.reads_transcript = any(map(reads_transcript, functions))
        self.takes_lists = any(map(takes_lists, functions))
        self.cpu_bound = any(getattr(function, "cpu_bound", False) for function in functions)

    def __call__(self, **fields: Any) -> Any:
        """The score of a sample's fields; a list of scores for lists of them (plural names)."""
        is_single = "solution_str" in fields
        if len(fields) > len(FIELDS) + self.reads_transcript:
            raise TypeError("reward_kwargs are for functions in files: use functools.partial")
        names = [name if is_single else name.removesuffix("s") for name in fields]
        values = [tuple(fields.values())] if is_single else zip(*fields.values(), strict=True)
        samples = [dict(zip(names, sample, strict=True)) for sample in values]
        returned = [self._scores(i, samples) for i in range(len(self._functions))]

        def checked(i: int, scores: Any) -> list[Any]:
            return one_each(scores, len(samples), f"{self._names[i]}()")

        def combine(by_function: Sequence[Sequence[Any]]) -> Any:
            results = [self._sum(scores) for scores in zip(*by_function, strict=True)]
            return results[0] if is_single else results

        async def wait() -> Any:
            lists = [checked(i, await s if inspect.isawaitable(s) else s) for i, s in enumerate(returned)]
            return combine([[await s if inspect.isawaitable(s) else s for s in scores] for scores in lists])

        if any(inspect.isawaitable(s) or (isinstance(s, list) and any(map(inspect.isawaitable, s))) for s in returned):
            return wait()
        return combine([checked(i, scores) for i, scores in enumerate(returned)])

    def _scores(self, i: int, samples: Sequence[Mapping[str, Any]]) -> Any:
        """What a function returns for the samples, awaited or not."""
        function, arguments = self._functions[i], self._columns[i]
        if arguments is None:
            names = fields_for(function)
            if takes_lists(function):
                return function(**{f"{name}s": [sample[name] for sample in samples] for name in names})
            return [function(**{name: sample[name] for name in names}) for sample in samples]
        infos = [sample["extra_info"] or {} for sample in samples]
        names = {name for info in infos for name in info if name not in (PROMPT, *_NOT_HERE)} | self.needs
        columns: dict[str, Any] = {name: [info.get(name) for info in infos] for name in names} | {
            "completions": [
                [{"role": "assistant", "content": text}] if isinstance(info.get(PROMPT), list) else text
                for text, info in zip((sample["solution_str"] for sample in samples), infos, strict=True)
            ],
            **{name: [sample[name] for sample in samples] for name in FIELDS if name != "solution_str"},
        }
        if any(PROMPT in info for info in infos):
            columns["prompts"] = [info.get(PROMPT) for info in infos]
        if self.reads_transcript:
            columns[TRANSCRIPT] = [sample[TRANSCRIPT] for sample in samples]
        passed = {name: column for name, column in columns.items() if "**" in arguments or name in arguments}
        return function(**passed)

    def _sum(self, scores: Sequence[Any]) -> Any:
        """Of one sample."""
        if len(scores) == 1 and self._weights == [1.0] and scores[0] is not None:
            return scores[0]
        total, components, steps = 0.0, dict[str, Any](), list[Step]()
        for name, weight, score in zip(self._names, self._weights, scores, strict=True):
            if isinstance(score, Mapping):
                if "score" not in score:
                    raise ValueError(f"{name}() returned a dict without 'score' (it has {', '.join(map(str, score))})")
                components |= {key: value for key, value in score.items() if key not in ("score", "step_rewards")}
                steps += scaled(as_steps(score.get("step_rewards", ())), weight)
                score = score["score"]
            if score is not None:
                total += weight * float(score)
                components[name] = float(score)
        if not components:  # this sample's error, not that of all in its batch
            components["error"] = f"none of {', '.join(self._names)} gave this sample a score"
        return {"score": total, "step_rewards": steps, **components}


def _columns_of(function: Callable[..., Any], name: str) -> tuple[str, ...] | None:
    """The keyword arguments of a function in TRL's form ("**": it takes any), None of one in verl's."""
    try:
        if hasattr(function, "save_pretrained"):
            raise TypeError("a model")
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one in C that does not say what it takes
        model = "a reward model is reward__reward_model__enable=True, reward__reward_model__model_path=…"
        got = f"got {type(function).__name__}; {model}"
        raise UserError(f"reward: a function is expected, {FORMS}, {got}") from None
    if "completions" in parameters:
        for argument in _NOT_HERE:
            if argument in parameters and parameters[argument].default is inspect.Parameter.empty:
                raise UserError(f"reward function {name}() asks for {argument}, which graders do not get: leave it out")
        return tuple("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters.values())
    try:
        plural = "s" * takes_lists(function)
        inspect.signature(function).bind(**{field + plural: None for field in fields_for(function)})
    except TypeError:
        raise UserError(f"reward function {name}({', '.join(parameters)}) must take {FORMS}") from None
    return None


def one_each(scores: Any, number: int, name: str) -> list[Any]:
    """What function `name` returned for `number` samples. TypeError, ValueError: it is no score for each of them."""
    if not hasattr(scores, "__len__") or isinstance(scores, str | Mapping | Set):
        raise TypeError(f"{name} returned {scores!r:.60}, not a list with a score for each sample")
    if len(scores) != number:
        raise ValueError(f"{name} returned {len(scores)} scores for {number} samples")
    return list(scores)


def _needed(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return needed - {"completions", "prompts", TRANSCRIPT, *FIELDS}


def fields_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """The fields of a Sample that a function in verl's form gets."""
    return (*FIELDS, TRANSCRIPT) if reads_transcript(function) else FIELDS


def reads_transcript(function: Callable[..., Any]) -> bool:
    """Whether a function asks for all that was said in an episode: by an argument of this name, or an attribute."""
    return getattr(function, "reads_transcript", not {TRANSCRIPT, f"{TRANSCRIPT}s"}.isdisjoint(_parameters(function)))


def takes_lists(function: Callable[..., Any]) -> bool:
    """Whether a function is in verl's form for batches."""
    return getattr(function, "takes_lists", "solution_strs" in _parameters(function))


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C that does not say what it takes
        return ()
