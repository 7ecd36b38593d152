"""What runs inside the walls: a program, functions that are called from outside, or the tests that call them.

Tests and the code under test live in two processes. The tests' process holds the expected values and calls the other
one over a pipe on which only plain data travels, rebuilt on arrival as Python's own types: nothing that the code under
test returns, patches or looks up can reach a comparison. Standard library only, and few imports: every run pays them.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
import os
import sys
import types

TYPE_CHECKING = False  # the typing module costs more than all the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_MAX_MESSAGE = 1 << 26  # bytes
_MAX_TEXT = 300  # characters of an error
_MUTABLE = (list, dict, set)
_ALIASES = {"np": "numpy", "pd": "pandas"}
_BUILTIN_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DECODERS = {
    **_COLLECTIONS, "dict": dict, "bytes": bytes.fromhex, "complex": complex, "type": _BUILTIN_TYPES.__getitem__
}  # fmt: skip
_OPERATIONS = {
    "call": lambda function, /, *args, **options: function(*args, **options),
    "get": getattr,
    "set": setattr,
    "list": list,
    "len": len,
    "bool": bool,
    "str": str,
    "item": operator.getitem,
}


class RemoteError(Exception):
    """The code under test raised something that is no built-in exception, or is gone."""


def encode(value: Any, handles: list[Any] | None = None) -> bytes:
    """Plain data as JSON: None, numbers, texts, bytes, collections, what subclasses any of these, and Python's types.

    What JSON does not know is an object with one entry, its type. With `handles`, any other object is appended there
    and its index is sent; without, it raises TypeError.
    """
    return json.dumps(_plain(value, handles)).encode()


def _plain(value: Any, handles: list[Any] | None) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item, handles) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key, handles), _plain(item, handles)] for key, item in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [_plain(item, handles) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": repr(value)}
    if isinstance(value, type) and _BUILTIN_TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    if type(value) is Remote:
        return {"remote": object.__getattribute__(value, "_target")}
    if callable(plain := getattr(value, "tolist", None)):  # numpy
        return _plain(plain(), handles)
    if handles is None:
        raise TypeError(f"a test cannot send a {type(value).__name__} to the code under test")
    handles.append(value)
    return {"remote": len(handles) - 1}


def decode(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    """Rebuilds the value; `resolve` gives the object for a name or a handle. Raises Exception for anything else."""

    def rebuild(part: Any) -> Any:
        if isinstance(part, list):
            return [rebuild(item) for item in part]
        if not isinstance(part, dict):
            return part
        [(name, content)] = part.items()
        return resolve(content) if name == "remote" else _DECODERS[name](rebuild(content))

    return rebuild(json.loads(data))


def write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def send(fd: int, message: bytes) -> None:
    write(fd, b"%08x" % len(message) + message)


def receive(fd: int) -> bytes | None:
    """The next message and not a byte more; None at the end."""
    head = _exactly(fd, 8)
    size = int(head, 16) if head else 0
    if size > _MAX_MESSAGE:
        raise RemoteError(f"a message of {size} bytes")
    return _exactly(fd, size) if head else None


def _exactly(fd: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(fd, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"" if size else b"".join(parts)


def take_over(fd: int) -> int:
    """Keep a standard stream for ourselves; whoever uses it from now on finds it empty (0) or writes to stderr (1)."""
    stream = os.dup(fd)
    if fd == 1:
        os.dup2(2, fd)
    else:
        nothing, writer = os.pipe()
        os.close(writer)
        os.dup2(nothing, fd)
        os.close(nothing)
    return stream


def run_program(codes: Sequence[str]) -> None:
    """Be a script started from a shell: the first of `codes` that is Python at all."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["solution.py"]
    builtins.exit = builtins.quit = sys.exit  # which Python takes from `site`, and that is not loaded here
    exec(_compiled(codes), vars(main))


def serve(codes: Sequence[str]) -> None:
    """Define the functions in `codes`, then answer requests on stdin with replies on stdout until stdin ends.

    What the code prints goes to stderr. The first reply says whether the code could be loaded.
    """
    requests, replies = take_over(0), take_over(1)
    module = sys.modules["solution"] = types.ModuleType("solution")
    handles: list[Any] = []

    def resolve(target: Any) -> Any:
        if isinstance(target, int):
            return handles[target]
        names = vars(module)
        if target not in names and "Solution" in names:  # LeetCode's form
            return getattr(names["Solution"](), target)
        if target not in names:
            raise NameError(f"name '{target}' is not defined")
        return names[target]

    def load() -> bytes:
        exec(_compiled(codes), vars(module))
        return encode((True, None, []))

    def answer(message: bytes) -> bytes:
        operation, target, args, options = decode(message, resolve)
        mutable = [argument for argument in args if isinstance(argument, _MUTABLE)]
        before = [encode(argument, []) for argument in mutable]
        value = _OPERATIONS[operation](target, *args, **options)
        changed = [a if encode(a, []) != b else None for a, b in zip(mutable, before, strict=True)]
        return encode((True, value, changed), handles)

    def attempt(action: Callable[[], bytes]) -> bytes:
        try:
            return action()
        except BaseException as error:
            return encode((False, type(error).__name__, str(error)[:_MAX_TEXT]))

    send(replies, attempt(load))
    while (message := receive(requests)) is not None:
        send(replies, attempt(lambda message=message: answer(message)))


class Wire:
    """The tests' end of the line to the code under test: requests out, replies in. File descriptors."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies, self._tested = requests, replies, True

    def ask(self, operation: str, remote: Remote, /, *args: Any, **options: Any) -> Any:
        """The value that an operation on a remote object has there; raises what it raised there.

        Of an object that is not under test the tests learn nothing, or it could be made to give the verdict.
        """
        message = encode((operation, remote, args, options))
        self._tested = object.__getattribute__(remote, "_tested")
        try:
            send(self._requests, message)
        except BrokenPipeError:
            raise RemoteError("the code under test has ended") from None
        value, changed = self.reply()
        arguments = [argument for argument in args if isinstance(argument, _MUTABLE)]
        for argument, content in zip(arguments, changed, strict=True):
            if content is not None:  # the function wrote into its argument
                argument.clear()
                getattr(argument, "extend" if isinstance(argument, list) else "update")(content)
        if not (self._tested or value is None or type(value) is Remote):
            raise RemoteError("a test asks the code for something that the test itself has to define")
        return value

    def reply(self) -> tuple[Any, list[Any]]:
        """The next reply's value, and the new content of arguments that the function changed (None: it did not)."""
        message = receive(self._replies)
        if message is None:
            raise RemoteError("the code under test has ended")
        fine, value, rest = decode(message, self._remote)
        if fine is True:
            return value, rest
        kind = getattr(builtins, value, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            raise kind(rest)
        raise RemoteError(f"{value}: {rest}")

    def _remote(self, target: Any) -> Remote:
        return Remote(self, target, self._tested)


def _asking(operation: str) -> Callable[..., Any]:
    """A method of Remote: the operation is carried out beside the object."""

    def ask(self: Remote, /, *args: Any, **options: Any) -> Any:
        return object.__getattribute__(self, "_wire").ask(operation, self, *args, **options)

    return ask


class Remote:
    """A function or object of the code under test, `tested` or a helper. Nothing else is equal to it."""

    __slots__ = ("_target", "_tested", "_wire")
    __call__, __setattr__, __getitem__ = _asking("call"), _asking("set"), _asking("item")
    __len__, __bool__, __str__ = _asking("len"), _asking("bool"), _asking("str")

    def __init__(self, wire: Wire, target: Any, tested: bool) -> None:
        for name, value in (("_wire", wire), ("_target", target), ("_tested", tested)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python tries
            raise AttributeError(name)
        return self._wire.ask("get", self, name)

    def __iter__(self) -> Any:
        return iter(self._wire.ask("list", self))


class _Names(dict):
    """The tests' names. One that neither they nor Python define is a module's, or a helper from the code under test."""

    def __init__(self, wire: Wire, texts: Sequence[str]) -> None:
        super().__init__(__name__="tests", __same__=same)
        self._wire, self._texts = wire, texts

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        used = any(f"{name}." in text for text in self._texts)
        if used and (name in sys.stdlib_module_names or name in _ALIASES):
            return __import__(_ALIASES.get(name, name))  # tests may rely on an import, but not on what it imports
        if hasattr(math, name):
            return getattr(math, name)
        return Remote(self._wire, name, tested=False)


def same(value: Any, expected: Any) -> bool:
    """Equal as JSON is: tuples are lists, keys are texts, and floats may differ by a millionth of their size."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = ({str(key): item for key, item in d.items()} for d in (value, expected))
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in value)
    if isinstance(value, int | float) and isinstance(expected, int | float) and float in (type(value), type(expected)):
        # Absolutely only what calculating with floats leaves of a zero.
        return value == expected or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-12)
    return value == expected


def check(wire: Wire, setup: Sequence[str], tests: Sequence[str], candidates: Sequence[str]) -> bytes:
    """How many tests pass, and what the first that does not says: an encoded (passed, text).

    `setup` and `tests` are Python texts that run one after another in one namespace; a test passes when it raises
    nothing. `candidates` are names that belong to the code under test even if the setup defines them.
    """
    names, passed, first = _Names(wire, [*setup, *tests]), 0, ""
    try:
        wire.reply()
        for text in setup:
            exec(_compiled([text]), names)
    except BaseException as error:
        return encode((0, f"{type(error).__name__}: {error}"[:_MAX_TEXT]))
    names |= {name: Remote(wire, name, tested=True) for name in candidates}
    for text in tests:
        try:
            exec(_compiled([text]), names)
            passed += 1
        except BaseException as error:
            first = first or f"{type(error).__name__}: {error}"[:_MAX_TEXT]
    return encode((passed, first))


def _compiled(codes: Sequence[str]) -> types.CodeType:
    sys.set_int_max_str_digits(0)  # integers of any length may be read and printed: the CPU limit is the limit
    *others, last = codes
    for code in others:
        try:
            return compile(code, "solution.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            pass
    return compile(last, "solution.py", "exec", dont_inherit=True)
