"""Registries by name; algorithms with what each needs and which options it takes."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

from valor.errors import UserError, did_you_mean
from valor.user_files import load_file

Function = TypeVar("Function", bound=Callable[..., Any])
Thing = TypeVar("Thing")


def choose(name: str, known: Iterable[str], what: str) -> str:
    """`name` if it is one of `known`; else a UserError that names the nearest ones."""
    if name in (names := list(known)):
        return name
    hint = did_you_mean(str(name), names, cutoff=0.5) or f"; known: {', '.join(names)}"
    raise UserError(f"unknown {what} '{name}'{hint}")


class Named(dict[str, Thing]):
    """Objects of one `kind` by name; an unknown name is a UserError."""

    def __init__(self, kind: str, things: Mapping[str, Thing] | None = None) -> None:
        super().__init__(things or {})
        self.kind = kind

    def __missing__(self, name: str) -> Thing:
        return self[choose(name, self, self.kind)]

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator that adds a function or a class under `name`, or replaces it."""

        def add(function: Function) -> Function:
            self[name] = cast(Thing, function)
            return function

        return add


@dataclass(frozen=True)
class Capability:
    """What an algorithm needs from the run; checked before any model is loaded.

    summary, paper: a description in place of its docstring, and a link.
    needs_critic: token values. min_group_size: samples of one prompt.
    needs_greedy_baseline: the reward of a greedy response per prompt. needs_components: named reward components.
    needs_sum_pi_squared: Σ_v π(v)² per position from the actor. natural_loss: the policy loss its paper pairs it with.
    aggregation: the loss_agg_mode that is part of a policy loss's definition (None: any). one_row: the policy loss is
        defined on complete sequences; episodes of several rows are refused.
    """

    summary: str = ""
    paper: str = ""
    needs_critic: bool = False
    min_group_size: int = 1
    needs_greedy_baseline: bool = False
    needs_components: bool = False
    needs_sum_pi_squared: bool = False
    natural_loss: str = "ppo"
    aggregation: str | None = None
    one_row: bool = False

    def needs(self) -> list[tuple[str, Any]]:
        """The fields after summary and paper that are not at their default."""
        values = [(field, getattr(self, field.name)) for field in fields(self)[2:]]
        return [(field.name, value) for field, value in values if value != field.default]


@dataclass(frozen=True)
class Entry:
    """A registered function, its capability, and the `common` inputs that functions of its kind may name."""

    name: str
    function: Callable[..., Any]
    capability: Capability
    common: frozenset[str]

    @property
    def builtin(self) -> bool:
        return self.function.__module__.startswith("valor.")

    @property
    def parameters(self) -> frozenset[str]:
        """The keywords that the function names."""
        parameters = inspect.signature(self.function).parameters.values()
        return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

    @property
    def options(self) -> frozenset[str]:
        """The keywords beyond the common inputs."""
        return self.parameters - self.common

    @property
    def takes_any(self) -> bool:
        """Whether it takes keywords that it does not name."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.function).parameters.values())

    def call(self, common: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Calls the function with the `common` inputs that it names, and all `options`, each of which it must know."""
        if self.takes_any:
            return self.function(**common, **options)
        for option in options:
            choose(option, sorted(self.options), f"option of {self.name}")
        return self.function(**{name: common[name] for name in common.keys() & self.parameters}, **options)


class Registry(Named[Entry]):
    """Algorithms of one kind; built-in ones and users' register by the same decorator."""

    all: ClassVar[list["Registry"]] = []

    def __init__(self, kind: str, *common: str) -> None:
        super().__init__(kind)
        self.common = frozenset(common)
        Registry.all.append(self)

    def register(self, name: str, **capability: Any) -> Callable[[Function], Function]:
        """Decorator that adds a function under `name`; keywords are fields of `Capability`.

        The same source function again (a file imported twice) replaces it; another one is a UserError.
        """

        def add(function: Function) -> Function:
            present = self.get(name)
            if present is not None and _origin(present.function) != _origin(function):
                raise UserError(f"{self.kind} '{name}' is already registered; choose another name")
            self[name] = Entry(name, function, Capability(**capability), self.common)
            return function

        return add


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    code = getattr(function, "__code__", None)
    return (code.co_filename if code else "", getattr(function, "__qualname__", repr(function)))


# A function gets by keyword the inputs here that it names, and its options. An estimator returns (advantages, returns),
# both [B, T].
ADVANTAGES = Registry(
    "advantage estimator", "rewards", "response_mask", "values", "group_ids", "reward_baselines", "gamma", "lam"
)
# `inputs` is a `valor.algorithms.ppo.LossInputs`; its `aggregate` and `fraction` make the (loss, metrics) to return.
POLICY_LOSSES = Registry(
    "policy loss", "inputs", "turn_ids", "sequence_log_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"
)
# A value loss returns three [B, T] tensors: loss, 1 where a clip binds, predicted value.
VALUE_LOSSES = Registry("value loss", "values", "returns", "old_values", "cliprange_value")

register_advantage = ADVANTAGES.register
register_policy_loss = POLICY_LOSSES.register
register_value_loss = VALUE_LOSSES.register


def load_custom(path: str | None) -> None:
    """Runs the user's file that registers algorithms (`algorithm.custom_path`), once a process; nothing for None.

    Every process that looks names up calls this. UserError: no such file, or it fails.
    """
    if path is not None:
        load_file(path, "algorithm.custom_path")


def describe_algorithms() -> str:
    """Text of all registries: each name with its summary or first paragraph of the docstring, paper, needs."""
    lines: list[str] = []
    for registry in Registry.all:
        lines += ["", registry.kind] if lines else [registry.kind]
        for name, entry in registry.items():
            about = entry.capability.summary or (inspect.getdoc(entry.function) or "").partition("\n\n")[0]
            needs = ", ".join(f"{key}={value}" for key, value in entry.capability.needs())
            head, indent = f"  {name:<30} ", " " * 33
            lines += textwrap.wrap(about, 120, initial_indent=head, subsequent_indent=indent) or [head]
            lines += [indent + line for line in (entry.capability.paper, needs) if line]
    return "\n".join(lines)
