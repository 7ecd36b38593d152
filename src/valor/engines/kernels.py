"""Faster layers for training: compiled by torch (`model.compile`), or Liger's (`model.use_liger`)."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from valor.config.engine import BackboneConfig
from valor.data.batch import Batch
from valor.engines.optim import global_norm
from valor.errors import UserError
from valor.models.images import vision_tower
from valor.models.internals import use_liger_kernels
from valor.models.packing import IMPLEMENTATION, packed_attention
from valor.models.rows import ROW_FIELDS

DEVICES = ("cuda",)  # where null tries them
_LEAST_TRIED = 2**27  # weights of a model: a smaller one has learnt before it is compiled

logger = logging.getLogger(__name__)


def use_kernels(engine: Any, layers: list[nn.Module], model: BackboneConfig, dtype: str) -> None:
    """Replace forwards of `layers`, the blocks of a training engine's model, as `model` asks for; null, by those that
    work on this device.

    `dtype`, in which they compute, decides how well numbers have to agree. UserError: those that are asked for do not,
    or cannot be had here, or rows are not packed. What null tries is left out with a warning.
    """
    hf, names = engine.module.hf, _wanted(engine, model)
    if not names:
        return
    if not engine.module.packed:
        raise UserError(
            f"model.{names[0]}=true is for packed rows, and {type(hf).__name__} reads padded ones: leave it out"
        )
    engine.onload()
    plain = _trial(engine)
    for name in names:
        restore, problem = _snapshot(hf), None
        try:
            if name == "use_liger":
                _use_liger(hf, engine.device)
            else:
                _compile(layers, engine.device)
            problem = _difference(_trial(engine), plain, 1e-4 if dtype == "float32" else 0.02)
        except UserError:  # it cannot be had, which null does not ask
            if getattr(model, name):
                raise
            restore()
        except RuntimeError as error:
            problem = f"does not work here: leave it out ({str(error).strip().splitlines()[0]})"
        if problem is not None and getattr(model, name):
            raise UserError(f"model.{name}=true {problem}")
        if problem is not None:
            restore()
            logger.warning("model.%s=false, as true %s", name, problem.replace(": leave it out", ""))
    engine.offload()


def _wanted(engine: Any, model: BackboneConfig) -> list[str]:
    """The kernels to use, or to try: where compiling takes longer than it saves, null tries nothing."""
    tries = (
        engine.device.type in DEVICES
        and getattr(engine.module, "packed", False)
        and vision_tower(engine.module.hf) is None
    )
    tries = tries and sum(p.numel() for p in engine.module.parameters()) >= _LEAST_TRIED
    settings = {name: getattr(model, name) for name in ("use_liger", "compile")}
    return [name for name, setting in settings.items() if setting or (setting is None and tries)]


def _snapshot(hf: nn.Module) -> Callable[[], None]:
    """What puts the functions of a model, and of its file, back in their places."""
    names = sys.modules[type(hf).__module__].__dict__
    states = [(vars(part), dict(vars(part))) for part in hf.modules()]
    functions = dict(names)

    def restore() -> None:
        names.update(functions)
        for state, before in states:
            state.clear()
            state.update(before)

    return restore


def _difference(ours: list[Tensor], plain: list[Tensor], most: float) -> str | None:
    """None where numbers agree."""
    difference = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, plain, strict=True) if b.norm() > 0)
    return None if difference <= most else f"gives other numbers (relative difference {difference:.2g}): leave it out"


def _trial(engine: Any) -> list[Tensor]:
    """What the model says of two rows, and the norm of its gradients where it is trained."""
    ids, lengths = torch.arange(24).view(2, 12), torch.tensor([12, 9])
    rows = Batch(dict(zip(ROW_FIELDS, (ids, lengths, ids + 5, lengths), strict=True)))
    numbers = list(engine.forward(rows).values())
    if engine.optimizer is not None:
        engine.forward_backward(rows, lambda outputs, _: (sum(x.sum() for x in outputs.values()), {}))
        norm = global_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
        engine.optimizer.zero_grad(set_to_none=True)
        numbers.append(torch.tensor([norm]))
    return numbers


def _compile(layers: list[nn.Module], device: torch.device) -> None:
    """Whole layers on GPUs. On CPUs their norms and feed-forward parts: attention is as fast either way."""
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(packed_attention))
    for layer in layers:
        inner = (part for name, part in layer.named_children() if "attn" not in name)
        for part in [layer] if device.type == "cuda" else inner:
            part.forward = _compiled(part.forward)


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, compiled but for decoding, which has other shapes at every step and is done in inference mode. (Whether
    packed rows are read is not known any more when a backward pass computes a layer again.)"""
    compiled = torch.compile(plain, dynamic=True)

    def forward(*args: Any, **options: Any) -> Any:
        return (plain if torch.is_inference_mode_enabled() else compiled)(*args, **options)

    return forward


def _use_liger(hf: Any, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError("model.use_liger=true: Liger's kernels need a GPU: leave it out, or see model.compile")
    try:
        from liger_kernel.transformers import monkey_patch as liger  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("model.use_liger=true needs Liger: pip install 'valor-rl[liger]'") from error
    if hf.config.model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"Liger has no kernels for {type(hf).__name__}: leave model.use_liger out")
    use_liger_kernels(hf)
