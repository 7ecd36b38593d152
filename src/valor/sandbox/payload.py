"""What runs inside the walls: a program, functions that are called from outside, or the tests that call them.

Tests and the code under test live in two processes. The tests' process holds the expected values and calls the other
one over a pipe on which only plain data travels, rebuilt on arrival as Python's own types: nothing that the code under
test returns, patches or looks up can reach a comparison. Standard library only, and few imports: every run pays them.
"""

from __future__ import annotations

import builtins
import marshal
import math
import operator
import os
import sys
import types

TYPE_CHECKING = False  # the typing module costs more than all the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

if TYPE_CHECKING or __package__:
    from valor.sandbox.plain import decode, encode, refused
else:  # as a file beside this one
    from plain import decode, encode, refused

_MAX_MESSAGE = 1 << 26  # bytes
_MAX_TEXT = 300  # characters of an error
_MUTABLE = (list, dict, set)
_ALIASES = {"np": "numpy", "pd": "pandas"}
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
        if isinstance(target, list):
            return types.FunctionType(marshal.loads(bytes.fromhex(target[0])), vars(module), target[1])
        names = vars(module)
        if target not in names and "Solution" in names:  # LeetCode's form
            return getattr(names["Solution"](), target)
        if target not in names:
            raise NameError(f"name '{target}' is not defined")
        return names[target]

    def handle(value: Any) -> int:
        handles.append(value)
        return len(handles) - 1

    def load() -> bytes:
        exec(_compiled(codes), vars(module))
        return encode((True, None, []))

    def answer(message: bytes) -> bytes:
        operation, target, args, options, classes = decode(message, resolve, resolve)
        mutable = _mutable(args, classes)
        before = [encode(argument, id, classes) for argument in mutable]
        value = _OPERATIONS[operation](target, *args, **options)
        changed = [a if encode(a, id, classes) != b else None for a, b in zip(mutable, before, strict=True)]
        return encode((True, value, changed), handle, classes)

    def attempt(action: Callable[[], bytes]) -> bytes:
        try:
            return action()
        except BaseException as error:
            return encode((False, type(error).__name__, str(error)[:_MAX_TEXT]))

    send(replies, attempt(load))
    while (message := receive(requests)) is not None:
        send(replies, attempt(lambda message=message: answer(message)))


def _mutable(arguments: Sequence[Any], classes: Collection[str]) -> list[Any]:
    return [a for a in arguments if isinstance(a, _MUTABLE) or type(a).__name__ in classes]


class Wire:
    """The tests' end of the line to the code under test: requests out, replies in. File descriptors.

    Instances of classes that the tests define, among their `names`, travel by their attributes.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies, self._tested = requests, replies, True
        self.names: Mapping[str, Any] = {}

    def ask(self, operation: str, remote: Remote, /, *args: Any, **options: Any) -> Any:
        """The value that an operation on a remote object has there; raises what it raised there.

        Of an object that is not under test the tests learn nothing, or it could be made to give the verdict.
        """
        classes = self._classes()
        message = encode((operation, remote, args, options, list(classes)), _target, classes)
        self._tested = object.__getattribute__(remote, "_tested")
        try:
            send(self._requests, message)
        except BrokenPipeError:
            raise RemoteError("the code under test has ended") from None
        value, changed = self.reply()
        for argument, content in zip(_mutable(args, classes), changed, strict=True):
            if content is not None:  # the function wrote into its argument
                before, after = (x if isinstance(x, _MUTABLE) else vars(x) for x in (argument, content))
                before.clear()
                getattr(before, "extend" if isinstance(before, list) else "update")(after)
        if not (self._tested or value is None or type(value) is Remote):
            raise RemoteError("a test asks the code for something that the test itself has to define")
        return value

    def _classes(self) -> dict[str, type]:
        return {name: c for name, c in self.names.items() if isinstance(c, type) and c.__module__ == "tests"}

    def reply(self) -> tuple[Any, list[Any]]:
        """The next reply's value, and the new content of arguments that the function changed (None: it did not)."""
        message = receive(self._replies)
        if message is None:
            raise RemoteError("the code under test has ended")
        fine, value, rest = decode(message, self._remote, self._classes().__getitem__)
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


def _target(value: Any) -> Any:
    """What the code under test knows an object of it by; a function of the tests travels as its code."""
    if type(value) is Remote:
        return object.__getattribute__(value, "_target")
    if type(value) is not types.FunctionType or value.__code__.co_freevars or value.__defaults__:
        return refused(value)
    return [marshal.dumps(value.__code__).hex(), value.__name__]


class _Names(dict):
    """The tests' names. One that neither they nor Python define is a module's, or a helper from the code under test."""

    def __init__(self, wire: Wire, texts: Sequence[str]) -> None:
        super().__init__(__name__="tests", __same__=same, __run__=run)
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


def run(test: Any) -> None:
    """Run a test of pytest (a function, with its cases, or a class of methods) or unittest (a TestCase)."""
    if isinstance(test, type):
        getattr(test, "setUpClass", getattr(test, "setup_class", lambda: None))()
        for name in [name for name in dir(test) if name.startswith("test")]:
            if hasattr(test, "debug"):  # of unittest: setUp, the method, tearDown
                test(name).debug()
                continue
            instance = test()
            if set_up := getattr(instance, "setup_method", None):
                set_up(*[None] * (set_up.__code__.co_argcount - 1))
            run(getattr(instance, name))
        return
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            rows = [getattr(value, "values", None) or (value if len(names) > 1 else (value,)) for value in values]
            cases = [case | dict(zip(names, row, strict=True)) for case in cases for row in rows]
    for case in cases:
        test(**case)


def check(wire: Wire, setup: Sequence[str], tests: Sequence[str], candidates: Sequence[str]) -> bytes:
    """How many tests pass, and what the first that does not says: an encoded (passed, text).

    `setup` and `tests` are Python texts that run one after another in one namespace; a test passes when it raises
    nothing. `candidates` are names that belong to the code under test even if the setup defines them.
    """
    wire.names = names = _Names(wire, [*setup, *tests])
    passed, first = 0, ""
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
