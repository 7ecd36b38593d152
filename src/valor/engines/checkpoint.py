"""Engine checkpoints: one safetensors file per rank, written and resharded by torch DCP, and one JSON of small state.

Nothing is pickled. Tensors are stored under `model.<name>` and `optimizer.<parameter name>.<state name>`; a rank
writes its own shards, and a reader at any world size takes the slices that it needs.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from valor.errors import Diverged, UserError
from valor.models.hf import published_config, tied_names
from valor.models.lora import ADAPTER_DIR, adapter_record, has_adapters, is_trained, write_adapter_config

STATE_FILE = "engine.json"
MODEL_CONFIG_DIR = "huggingface"  # config.json of the model and of its adapters, generation_config.json
FORMAT = 1
_MOMENTS = 2  # tensors that AdamW keeps for each parameter


@dataclass
class Counters:
    """What an engine has done: applied updates, skipped ones, and steps of the learning-rate schedule."""

    updates: int = 0
    skipped: int = 0
    schedule_steps: int = 0


def save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, counters: Counters) -> None:
    """Write the state into the directory `path` (made if missing); collective, returns when all ranks are done.

    Of a model with adapters these and the head alone are its weights. Diverged: some numbers are not finite.
    """
    if ruined := _not_finite(module, optimizer):
        raise not_saved(ruined)
    tensors = {f"model.{name}": value for name, value in _module_tensors(module).items()}
    steps: dict[str, float] = {}
    if optimizer is not None:
        for name, state in _optimizer_states(module, optimizer).items():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if key != "step"}
            if "step" in state:
                steps[name] = float(state["step"])
    write(path, module, tensors, counters, type(optimizer).__name__ if optimizer is not None else None, steps)


def write(
    path: Path,
    module: nn.Module,
    tensors: dict[str, Tensor],
    counters: Counters,
    optimizer: str | None,
    steps: dict[str, float],
) -> None:
    """Write this rank's `tensors`, and what `module` is, into the directory `path`; collective. steps: those that the
    `optimizer` of this name has taken with each parameter."""
    path.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        for leftover in path.glob("*.safetensors"):  # a reader takes every shard that it finds
            leftover.unlink()
    dist.barrier()
    with _errors_of_a_rank():
        dcp_save(tensors, storage_writer=_ShardWriter(str(path)), no_dist=_alone())
    if dist.get_rank() == 0:
        state = {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "counters": asdict(counters),
            "optimizer": optimizer,
            "optimizer_scalars": {name: {"step": {"tensor": n, "dtype": "float32"}} for name, n in steps.items()},
            "adapters": adapter_record(cast(Any, module).hf),
        }
        (path / STATE_FILE).write_text(json.dumps(state))
        hf = cast(Any, module).hf
        hf.config.architectures = [type(hf).__name__.removeprefix("FSDP")]  # not that of the files it was loaded from
        with published_config(hf) as config:
            config.save_pretrained(path / MODEL_CONFIG_DIR)
        if hf.can_generate():
            hf.generation_config.save_pretrained(path / MODEL_CONFIG_DIR)
        if has_adapters(hf):
            write_adapter_config(hf, path / MODEL_CONFIG_DIR / ADAPTER_DIR)
    dist.barrier()


def load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Counters:
    """Fill module and optimizer in place from `path`, whatever the world size it was written at.

    Without optimizer only the weights are read; one process needs no process group for it. UserError: no checkpoint
    there, one of another model or of other adapters, one without the state of this optimizer, or with numbers that are
    not finite.
    """
    state, stored = begin_to_read(path, module, type(optimizer).__name__ if optimizer is not None else None)
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in _module_tensors(module).items()}
    if optimizer is not None:
        tensors |= _prepare_optimizer(module, optimizer, stored, state["optimizer_scalars"])
    check_fit(path, {name: tuple(value.shape) for name, value in tensors.items()}, stored)
    read_into(path, tensors)
    if ruined := _not_finite(module, optimizer):
        raise of_no_use(path, ruined)
    return Counters(**state["counters"])


def begin_to_read(path: Path, module: nn.Module, optimizer: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The small state in `path`, and what is known of each tensor that a reader needs: without optimizer the weights.
    UserError: no checkpoint, or one of something else."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"'{path}' is no engine checkpoint: {error}") from error
    if state["format"] != FORMAT:
        raise UserError(f"'{path}' has checkpoint format {state['format']}; this version reads format {FORMAT}")
    _check_adapters(path, state.get("adapters", {}), adapter_record(getattr(module, "hf", module)))
    if optimizer is not None and state["optimizer"] != optimizer:
        there = state["optimizer"] or "no optimizer"
        raise UserError(
            f"'{path}' holds the state of {there}, not of {optimizer}: take that change back, or begin a run from its "
            "weights (valor export)"
        )
    stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return state, {name: x for name, x in stored.items() if optimizer is not None or name.startswith("model.")}


def read_into(path: Path, tensors: dict[str, Tensor], *, together: bool = True) -> None:
    """Fill this rank's `tensors` from `path`; together: collective, which shards (DTensors) have to be."""
    with _errors_of_a_rank():
        dcp_load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=_alone() or not together)


def not_saved(ruined: str) -> Diverged:
    return Diverged(f"{ruined} is not finite, and was not saved: lower the learning rate, or set optim.clip_grad")


def of_no_use(path: Path, ruined: str) -> UserError:
    return UserError(f"the checkpoint '{path}' is of no use: {ruined} is not finite; resume from an earlier one")


def size(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that `save` writes, over all ranks."""
    total = sum(value.numel() * value.element_size() for value in _module_tensors(module).values())
    if optimizer is not None:
        trained = (p for p in module.parameters() if p.requires_grad)
        total += sum(_MOMENTS * p.numel() * p.element_size() for p in trained)
    return total


@contextmanager
def _errors_of_a_rank() -> Iterator[None]:
    """What a rank of torch DCP has raised, as that rank's own error."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _alone() -> bool:
    """Whether DCP has nobody to talk to. It would through gloo, whose threads then keep OpenMP threads of their own for
    the rest of the run: with more of them than cores every later operation waits for threads that sleep."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    return not dist.is_initialized() or dist.get_world_size() == 1


class _ShardWriter(HuggingFaceStorageWriter):
    """DCP's safetensors writer, straight to the file: torch's own builds every file in memory first.

    Measured on 1.5 GB: a third of its processor time and no second copy of the state.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, Any] = {}
        results: list[WriteResult] = []
        for item in plan.items:
            tensor = cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
            assert item.tensor_data is not None, "only tensors are stored"
            tensors[item.index.fqn] = tensor
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensor.nbytes, None))
        if tensors:
            file = Path(self.path) / f"shard-{dist.get_rank():05d}.safetensors"
            save_file(tensors, file, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def check_fit(path: Path, shapes: dict[str, tuple[int, ...]], stored: dict[str, Any]) -> None:
    """UserError: the tensors that are `stored` are not those of all ranks' `shapes`."""
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise UserError(f"the checkpoint '{path}' lacks {missing[0]} (and {len(missing) - 1} more): another model?")
    extra = [name for name in stored if name not in shapes]
    if extra:
        raise UserError(
            f"the checkpoint '{path}' has {extra[0]} (and {len(extra) - 1} more), the model has not: another model?"
        )
    for name, here in shapes.items():
        there = tuple(stored[name].size)
        if there != here:
            raise UserError(f"the checkpoint '{path}' has {name} of shape {there}, the model {here}")


def _not_finite(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> str | None:
    """The first weight or optimizer state on this rank with a number that is not finite."""
    states = _optimizer_states(module, optimizer) if optimizer is not None else {}
    for name, parameter in module.named_parameters():
        for what, value in {"": parameter.detach(), **states.get(name, {})}.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(local, Tensor) and not is_finite(local):
                return f"{what} of {name}" if what else name
    return None


def is_finite(tensor: Tensor) -> bool:
    """Its extremes are not finite either, and cost a tenth of a look at every number."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def _check_adapters(path: Path, stored: dict[str, Any], here: dict[str, Any]) -> None:
    """Adapters mean something only with the base and the settings that they were trained with."""
    if stored.get("base", here.get("base")) != here.get("base", stored.get("base")):
        raise UserError(f"the checkpoint '{path}' holds adapters of another base model: set model.path to that one")
    for key, value in here.items():
        there = stored.get(key, 0 if key == "lora_rank" else value)
        if there != value:
            raise UserError(f"the checkpoint '{path}' was written with {key}={there}, this run has {key}={value}")


def _module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and persistent buffers; of a model with adapters only what trains."""
    left_out, adapters = tied_names(module), has_adapters(getattr(module, "hf", module))
    every = module.state_dict().items()
    return {name: value for name, value in every if name not in left_out and (not adapters or is_trained(name))}


def _optimizer_states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[p] for name, p in module.named_parameters() if p in optimizer.state}


def _prepare_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: dict[str, Any], scalars: dict[str, dict[str, Any]]
) -> dict[str, Tensor]:
    """Give the optimizer empty state of the stored shapes; returns the tensors that loading will fill."""
    optimizer.state.clear()
    targets: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        for key in [key for key in stored if key.startswith(prefix)]:
            value = torch.zeros_like(parameter.detach())  # in its dtype, which may be another than the stored one
            optimizer.state[parameter][key.removeprefix(prefix)] = value
            targets[key] = value
        if name in scalars:
            step = scalars[name]["step"]["tensor"]
            optimizer.state[parameter]["step"] = torch.tensor(step, dtype=torch.float32, device=parameter.device)
    return targets
