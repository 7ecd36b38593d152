"""Where each tensor of a transformers module lies in megatron-core's parameters: read whole, written, bit for bit.

megatron-core joins queries, keys and values by group of heads, gate and up projections, and fills the vocabulary up to
a multiple of the tensor parallel size. Layers lie on stages, experts on ranks of their own.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from valor.engines.fsdp.loading import value_of_rank_0
from valor.engines.megatron.layout import mpu

# The name in megatron-core, that in transformers, and the dimension that tensor parallel ranks share.
_LAYER = {
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
    "score.weight": ("score.weight", None),
    "score.bias": ("score.bias", None),
}
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class Slot:
    """This rank's part of a tensor, `name`, of the module around a transformers module.

    It is cut from one of megatron-core's parameters, or from one of each local expert and stacked. `shape`: of the
    whole tensor, its dimensions split up where the parameters need it; `flat`: as transformers has it. Ranks of each of
    the `groups` have parts that are joined along the dimension given.
    """

    name: str
    flat: tuple[int, ...]
    shape: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    cut: Callable[[Tensor], Tensor]
    groups: tuple[tuple[Any, int], ...]
    stacked: bool

    def read(self, values: Sequence[Tensor]) -> Tensor:
        """The full tensor (collective in the groups), from tensors of the parameters' shapes."""
        cuts = [self.cut(value.detach()) for value in values]
        part = torch.stack(cuts) if self.stacked else cuts[0]
        for group, dim in self.groups:
            parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            part = torch.cat(parts, dim).narrow(dim, 0, self.shape[dim])
        return part.reshape(self.flat)

    def write(self, values: Sequence[Tensor], full: Tensor) -> None:
        """This rank's part of `full` into tensors of the parameters' shapes."""
        part = full.view(self.shape)
        for group, dim in self.groups:
            size = -(-self.shape[dim] // group.size())
            begin = min(group.rank() * size, self.shape[dim])
            part = part.narrow(dim, begin, min(size, self.shape[dim] - begin))
        for value, piece in zip(values, part if self.stacked else [part], strict=True):
            target = self.cut(value.detach())
            for dim, size in enumerate(piece.shape):
                target = target.narrow(dim, 0, size)
            target.copy_(piece)


def find_slots(stage: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Any) -> list[Slot]:
    """The slots of this rank's parameters. `shapes`: of all tensors of the transformers module; `config`: its config.

    A tensor that is tied has one on the first stage and, if that is another one, on the last stage.
    """
    tensor = mpu.get_tensor_model_parallel_group()
    expert_tensor = mpu.get_expert_tensor_parallel_group()
    expert = mpu.get_expert_model_parallel_group()
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    slots: list[Slot] = []

    def add(
        name: str,
        parameters: Sequence[nn.Parameter],
        cut: Callable[[Tensor], Tensor],
        shared: Sequence[tuple[Any, int]],
        split: Sequence[int] | None = None,
        stacked: bool = False,
    ) -> None:
        name = name if name in shapes else _TIED[name]
        several = tuple((group, dim) for group, dim in shared if group.size() > 1)
        flat = shapes[name]
        slots.append(Slot(f"hf.{name}", flat, tuple(split or flat), tuple(parameters), cut, several, stacked))

    experts: dict[tuple[str, str], list[nn.Parameter]] = {}
    for local_name, parameter in stage.named_parameters():
        if (match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", local_name)) is None:
            name, dim = _OUTSIDE[local_name]
            add(name, [parameter], _same, [] if dim is None else [(tensor, dim)])
            continue
        number: Any = stage.decoder.layers[int(match[1])].layer_number  # type: ignore[index, union-attr]
        layer, rest = f"model.layers.{number - 1}.", match[2]
        if rest in _LAYER:
            name, dim = _LAYER[rest]
            add(layer + name, [parameter], _same, [] if dim is None else [(tensor, dim)])
        elif rest.startswith("self_attention.linear_qkv."):
            for name, parts in (("q", slice(0, -2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
                name = f"{layer}self_attn.{name}_proj.{rest.rpartition('.')[2]}"
                split = (groups, shapes[name][0] // (groups * size), size, *shapes[name][1:])
                cut = partial(_heads, per_group=heads // groups + 2, size=size, parts=parts)
                add(name, [parameter], cut, [(tensor, 0)], split)
        elif rest == "mlp.linear_fc1.weight":
            for half, name in enumerate(("gate", "up")):
                add(f"{layer}mlp.{name}_proj.weight", [parameter], partial(_half, half=half), [(tensor, 0)])
        else:  # in the order of the experts
            which = re.fullmatch(r"mlp\.experts\.local_experts\.\d+\.linear_(fc\d)\.weight", rest)
            assert which is not None, rest
            experts.setdefault((layer, which[1]), []).append(parameter)
    for (layer, which), parameters in experts.items():
        joined = which == "fc1"
        name = f"{layer}mlp.experts.{'gate_up' if joined else 'down'}_proj"
        count, rows, columns = shapes[name]
        split = (count, 2, rows // 2, columns) if joined else None
        cut = _in_halves if joined else _same
        add(name, parameters, cut, [(expert_tensor, 2), (expert, 0)], split, stacked=True)
    return slots


def _same(value: Tensor) -> Tensor:
    return value


def _in_halves(value: Tensor) -> Tensor:
    return value.unflatten(0, (2, -1))


def _half(value: Tensor, half: int) -> Tensor:
    return _in_halves(value)[half]


def _heads(value: Tensor, per_group: int, size: int, parts: slice) -> Tensor:
    """Queries, keys or values [groups, heads, size, ...] of groups of heads that lie one behind the other."""
    return value.unflatten(0, (-1, per_group, size))[:, parts]


class Weights:
    """A transformers module's tensors in the parameters of all stages."""

    def __init__(self, stage: nn.Module, module: Any) -> None:
        """`module`: the model under whose names tensors go in and out; its own weights are not read."""
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        shapes = {name.removeprefix("hf."): shape for name, shape in self.shapes.items()}
        self.slots = find_slots(stage, shapes, module.hf.config.get_text_config())
        self._by_name = {slot.name: slot for slot in self.slots}
        self._group = mpu.get_pipeline_model_parallel_group()
        stages: list[Any] = [None] * self._group.size()
        dist.all_gather_object(stages, list(self._by_name), group=self._group)
        self._owner = {name: stage for stage in reversed(range(len(stages))) for name in stages[stage]}
        assert set(self._owner) == set(self.shapes), set(self._owner) ^ set(self.shapes)

    def owns(self, slot: Slot) -> bool:
        """False on the last stage for a tensor that is tied to one of the first."""
        return self._owner[slot.name] == self._group.rank()

    def take(self, module: nn.Module, device: torch.device) -> None:
        """The values that rank 0's `module` has (collective)."""
        for name, parameter in module.named_parameters():
            value = value_of_rank_0(parameter, device)
            if name in self._by_name:
                self._by_name[name].write(self._by_name[name].parameters, value)

    def full(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, full, one at a time, on all ranks (collective)."""
        dtype = self.slots[0].parameters[0].dtype
        for name, shape in self.shapes.items():
            slot = self._by_name.get(name)
            if slot is not None and self.owns(slot):
                value = slot.read(slot.parameters).contiguous()
            else:
                kind = torch.float32 if name.startswith("hf.score.") else dtype
                value = torch.empty(shape, dtype=kind, device=device)
            if self._group.size() > 1:
                dist.broadcast(value, group=self._group, group_src=self._owner[name])
            yield name, value

    def norm(self) -> float:
        """The 2-norm over all tensors, the same on every rank (collective)."""
        world = dist.get_world_size()
        total = torch.zeros((), dtype=torch.float64, device=self.slots[0].parameters[0].device)
        for slot in self.slots:
            if not self.owns(slot):
                continue
            parts = prod(group.size() for group, _ in slot.groups) * self._group.size()
            for parameter in slot.parameters:  # each part is there on as many ranks as there are ranks to a part
                norm = torch.linalg.vector_norm(slot.cut(parameter.detach()), dtype=torch.float32)
                total += norm.double().square() * parts / world
        dist.all_reduce(total)
        return float(total.sqrt())
