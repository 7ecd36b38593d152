"""Python files of the user's own: graders, advantage estimators, losses, tools, environments."""

import hashlib
import importlib
import importlib.util
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from contextlib import chdir, nullcontext
from io import BytesIO
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS

from valor.errors import UserError, did_you_mean


def load_file(path: str, key: str, *, stays: bool = True) -> ModuleType:
    """Import a Python file by its path, once a process; its folder joins the end of `sys.path` for its own imports.

    stays: the process stays in the folder it is in, wherever the file changes to: other paths are relative to that.
    UserError, naming the configuration `key` that holds the path: no such file, not Python, or it fails on import.
    """
    file = Path(path).expanduser().resolve()
    name = f"valor_custom_{file.stem}_{zlib.crc32(str(file).encode())}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise UserError(f"{path}: no such file; check {key}")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: is not a Python file; {key} must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        with chdir(".") if stays else nullcontext():
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{path}: fails on import ({type(error).__name__}: {error})") from error
    return module


def installed(module: str, what: str, install: str) -> Any:
    """An optional module. UserError: it is not installed, and how to `pip install` it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} ({error}): pip install {install}") from None


def load_object(name: str, key: str, *, stays: bool = True) -> Any:
    """The object at `file.py:Name`, `package.module:Name` or `package.module.Name`; `stays` as in `load_file`.

    UserError, naming the configuration `key` that holds it: there is none, or its import fails.
    """
    source, _, member = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not source or not member or name.endswith(".py"):
        raise UserError(f"{key}: '{name}' must be file.py:Name or package.module.Name")
    if source.endswith(".py") or "/" in source:
        module = load_file(source, key, stays=stays)
    else:
        try:
            with chdir(".") if stays else nullcontext():
                module = importlib.import_module(source)
        except Exception as error:
            raise UserError(f"{key}: '{source}' cannot be imported ({type(error).__name__}: {error})") from error
    if not hasattr(module, member):
        names = [name for name in {**vars(module), **dict.fromkeys(getattr(module, "__all__", ()))} if name[0] != "_"]
        there = did_you_mean(member, names) or f" (it has {', '.join(names[:10]) or 'none'})"
        raise UserError(f"{key}: {source} has no '{member}'{there}")
    return getattr(module, member)


def pickled(function: Any, what: str, key: str) -> bytes:
    """The bytes of a function, for `unpickled` in a process without its module; equal for equal code in any session.

    What an imported module of the user's has is in it by name alone: the module's content is part of the bytes, unread.
    UserError: something in it cannot be pickled; `what` the function is, and the `key` that takes a file instead.
    """
    pickler = _Pickler(buffer := BytesIO())
    try:
        pickler.dump(function)
    except Exception as error:  # of whatever objects they hold on to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{what} cannot travel to other processes ({reason}): make what it holds on to inside it, or give a file "
            f"with {key.replace('.', '__')}"
        ) from None
    return _without_random_names(buffer.getvalue()) + _contents(pickler.modules)


def unpickled(path: str) -> Callable[..., Any]:
    """The function of which `path` holds the `pickled` bytes. UserError: it cannot be read here."""
    try:
        return _Unpickler(BytesIO(Path(path).expanduser().read_bytes())).load()
    except Exception as error:
        advice = "put its folder on PYTHONPATH" if isinstance(error, ImportError) else "check what was given to the run"
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error}): {advice}") from None


def _without_random_names(content: bytes) -> bytes:
    """The bytes with the random numbers that cloudpickle gives to classes made from what surrounds these."""
    names = [name.encode() for name in _DYNAMIC_CLASS_TRACKER_BY_CLASS.values() if name.encode() in content]
    digest = hashlib.sha256(re.sub(b"|".join(names), b"", content) if names else content).hexdigest()
    for i, name in enumerate(sorted(names, key=content.index)):
        content = content.replace(name, hashlib.sha256(f"{digest} {i}".encode()).hexdigest()[: len(name)].encode())
    return content


def _weights(content: bytes) -> Any:
    """Weights of a model that a function holds."""
    import torch

    return torch.load(BytesIO(content), weights_only=False)


def _contents(modules: set[str]) -> bytes:
    """A digest of the files of those that are the user's own; none if no module is."""
    libraries = {*sys.stdlib_module_names, "valor", "__main__"}
    names = sorted(name for name in modules if name.partition(".")[0] not in libraries)
    files = [Path(getattr(sys.modules.get(name), "__file__", None) or "") for name in names]
    files = [file for file in files if file.is_file() and "-packages" not in str(file)]
    return b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)


class _Pickler(cloudpickle.Pickler):
    """Leaves out the folder in which code was compiled (of a notebook's cell it holds the number of a process), the
    order of sets and the addresses of weights, which differ from session to session."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._sets: dict[int, tuple[int, Any]] = {}  # by their id: a number, and the set, so that the id stays its
        self.modules: set[str] = set()  # of what was pickled by name

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__name__ == "TypedStorage":  # of a model's weights, into which torch's own way writes an address
            sys.modules["torch"].save(obj, content := BytesIO())
            return _weights, (content.getvalue(),)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and isinstance(obj, type | FunctionType | ModuleType):
            self.modules.add(obj.__name__ if isinstance(obj, ModuleType) else obj.__module__)
        return reduced

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) not in (set, frozenset):
            return None
        number, is_new = len(self._sets), id(obj) not in self._sets
        number = self._sets.setdefault(id(obj), (number, obj))[0]
        return (number, type(obj), sorted(obj, key=repr)) if is_new else (number,)

    @staticmethod
    def _code(code: CodeType) -> Any:
        return cloudpickle.Pickler.dispatch_table[CodeType](code.replace(co_filename=Path(code.co_filename).name))

    dispatch_table: Any = {**cloudpickle.Pickler.dispatch_table, CodeType: _code}  # noqa: RUF012


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._sets: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, *made = pid
        if made:
            kind, items = made
            self._sets[number] = kind(items)
        return self._sets[number]
