"""Python files of the user's own: graders, advantage estimators, losses, tools, environments."""

import importlib
import importlib.util
import pickle
import sys
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from valor.errors import UserError, did_you_mean


def load_file(path: str, key: str) -> ModuleType:
    """Import a Python file by its path, once a process; its folder joins the end of `sys.path` for its own imports.

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
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{path}: fails on import ({type(error).__name__}: {error})") from error
    return module


def installed(module: str, what: str, install: str) -> Any:
    """A module of a package that not everybody has. UserError: it is not there, and how to `pip install` it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} ({error}): pip install {install}") from None


def load_object(name: str, key: str) -> Any:
    """What `file.py:Name`, `package.module:Name` or `package.module.Name` names.

    UserError, naming the configuration `key` that holds it: there is none, or its import fails.
    """
    place, _, member = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not member:
        raise UserError(f"{key}: '{name}' must be file.py:Name or package.module.Name")
    if place.endswith(".py") or "/" in place:
        module = load_file(place, key)
    else:
        try:
            module = importlib.import_module(place)
        except Exception as error:
            raise UserError(f"{key}: '{place}' cannot be imported ({type(error).__name__}: {error})") from error
    if not hasattr(module, member):
        known = [one for one in {**vars(module), **dict.fromkeys(getattr(module, "__all__", ()))} if one[0] != "_"]
        there = did_you_mean(member, known) or f" (it has {', '.join(known[:10]) or 'none'})"
        raise UserError(f"{key}: {place} has no '{member}'{there}")
    return getattr(module, member)


def pickled(function: Any, what: str, key: str) -> bytes:
    """A function for `unpickled` in another process, where its module need not be. The bytes are the same for the same
    code in another session. UserError: something in it cannot travel; `what` it is, and the `key` that takes a file."""
    buffer = BytesIO()
    try:
        _Pickler(buffer).dump(function)
    except Exception as error:  # of whatever objects they hold on to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{what} cannot travel to other processes ({reason}): make what it holds on to inside it, or give a file "
            f"with {key.replace('.', '__')}"
        ) from None
    return buffer.getvalue()


def unpickled(path: str) -> Callable[..., Any]:
    """What `pickled` wrote into a file. UserError: it cannot be read here."""
    try:
        return pickle.loads(Path(path).expanduser().read_bytes())
    except Exception as error:
        text = f"{path}: cannot be read ({type(error).__name__}: {error}); check what was given to the run"
        raise UserError(text) from None


class _Pickler(cloudpickle.Pickler):
    """Code knows the folder that it was compiled in, and that of a notebook's cell has the number of a process."""

    @staticmethod
    def _code(code: CodeType) -> Any:
        return cloudpickle.Pickler.dispatch_table[CodeType](code.replace(co_filename=Path(code.co_filename).name))

    dispatch_table: Any = {**cloudpickle.Pickler.dispatch_table, CodeType: _code}  # noqa: RUF012
