"""SGLang servers as child processes: started on the devices of some ranks, watched, and ended with the run."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import httpx2
import torch
import torch.distributed as dist

from valor.config import ModelConfig, RolloutConfig
from valor.config.rollout import ServerConfig
from valor.errors import TrainingStopped
from valor.http_client import ask

_PAUSE, _END_SECONDS = 0.5, 30.0
# The child ends with the process that started it, however that ends (prctl's PR_SET_PDEATHSIG, on Linux).
_CHILD = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class StartedServer:
    """`python -m sglang.launch_server` with `arguments`, whose output goes to `log`."""

    def __init__(self, url: str, arguments: list[str], devices: str | None, log: Path) -> None:
        self.url, self._log = url, log
        self._command = [sys.executable, "-c", _CHILD, "-m", "sglang.launch_server", *arguments]
        self._environment = os.environ | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
        atexit.register(self.close)
        self._start()

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        """Return once it generates. TrainingStopped, with the end of its log, when it ends or that takes longer."""
        end = time.monotonic() + seconds
        while not self._generates():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > end:
                what = "has ended" if ended else f"is not ready after {seconds:g} s"
                lines = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                self.close()
                raise TrainingStopped(f"the SGLang server that was started here {what} ({self._log}): {''.join(lines)}")
            time.sleep(_PAUSE)

    def _generates(self) -> bool:
        with suppress(httpx2.HTTPError):
            return ask("GET", f"{self.url}/health_generate", api_key_env=None, timeout=20.0).status_code == 200
        return False

    def revive(self) -> bool:
        """Start it again if it has ended; whether it had."""
        if self._process.poll() is None:
            return False
        self._start()
        return True

    def close(self) -> None:
        """End it and all processes that it has started."""
        atexit.unregister(self.close)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def started_servers(
    config: RolloutConfig, model: ModelConfig, device: torch.device
) -> tuple[list[StartedServer], ServerConfig]:
    """The servers that this rank has started, and settings with the addresses of all ranks' servers (collective).

    A server has the devices of `tensor_model_parallel_size` neighbouring ranks, and is started by the first of them.
    """
    rank, size = dist.get_rank(), config.tensor_model_parallel_size
    host, sleeps = socket.gethostname(), config.free_cache_engine and device.type == "cuda"
    ranks: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    index, visible = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    dist.all_gather_object(ranks, (host, visible.split(",")[index] if visible else str(index)))
    servers: list[StartedServer] = []
    if rank % size == 0:
        local = all(other == host for other, _ in ranks)
        address = "127.0.0.1" if local else socket.gethostbyname(host)
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        arguments = [*_arguments(config, model, device, sleeps=sleeps), "--host", address, "--port", str(port)]
        devices = ",".join(name for _, name in ranks[rank : rank + size]) if device.type == "cuda" else None
        log = Path(config.server.log_dir) / f"sglang_{rank}.log"
        servers = [StartedServer(f"http://{address}:{port}", arguments, devices, log)]
        servers[0].wait(config.server.timeout)
    urls: list[list[str]] = [[]] * len(ranks)
    dist.all_gather_object(urls, [server.url for server in servers])
    return servers, config.server.model_copy(update={"base_url": [*chain.from_iterable(urls)], "sleep": sleeps})


def _arguments(config: RolloutConfig, model: ModelConfig, device: torch.device, *, sleeps: bool) -> list[str]:
    """Command line of `sglang.launch_server`; options of `engine_kwargs.sglang` have the last word."""
    options = {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": config.dtype,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tensor_model_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "enable_memory_saver": sleeps,
        "sampling_defaults": "openai",  # none from the model's files
        "device": device.type,
    }
    arguments = []
    for name, value in (options | config.engine_kwargs.get("sglang", {})).items():
        if value is not None and value is not False:
            arguments.append(f"--{name.replace('_', '-')}")
            values = [] if value is True else value if isinstance(value, list) else [value]
            arguments += [json.dumps(item) if isinstance(item, dict) else str(item) for item in values]
    return arguments
