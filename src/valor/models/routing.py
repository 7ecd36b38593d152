"""What the routers of a mixture of experts choose: recorded while tokens are generated, and chosen again in training
(rollout routing replay, https://arxiv.org/abs/2510.11370).

Shapes: N tokens of a model call, C choices for each: layers times experts of a token. A choice is the expert's number
plus 1; 0: the router chooses by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from valor.errors import UserError
from valor.models.hf import input_device

ROUTES = "routes"
"""Column [B, W C] uint8 or int16: the choices for each token of a row, prompt and response without a gap."""


class Routers:
    """The routers in `hf`, layer after layer. `replayed` [N, C]: what they choose in model calls; None: freely.

    It has to stay until the gradients of a call are there, as layers may be computed again for them. UserError: `hf`
    has no routers that choose by one top-k each.
    """

    def __init__(self, hf: Any) -> None:
        kinds = tuple(_router_classes(hf))
        routers = [module for module in hf.modules() if kinds and isinstance(module, kinds)]
        for number, router in enumerate(routers):
            router.forward = partial(_route, self, number, router)
        self.replayed: Tensor | None = None
        self._recorded: list[Tensor] | None = None  # [N, k] of each router
        self._layers, self._experts, self.choices = len(routers), 0, 0
        with torch.no_grad(), self.recording():
            hf(input_ids=torch.arange(3, device=input_device(hf))[None], use_cache=False)
            if not routers or len(self._recorded or ()) != len(routers):
                raise UserError(
                    f"{type(hf).__name__} has no routers that choose experts by one top-k each: set "
                    "actor_rollout_ref.actor.router_replay.mode=disabled"
                )
            self.choices = self.recorded().shape[1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Routers choose freely, and each model call is followed by a call of `recorded`."""
        self._recorded, self.replayed = [], None
        try:
            yield
        finally:
            self._recorded = None

    def recorded(self) -> Tensor:
        """[N, C] of the last model call."""
        assert self._recorded is not None, "inside of `recording`"
        dtype = torch.uint8 if self._experts < 2**8 else torch.int16
        chosen, self._recorded = torch.cat(self._recorded, dim=1) + 1, []
        return chosen.to(dtype)

    def choose(self, number: int, scores: Tensor, largest: Tensor) -> Tensor:
        """[N, k] the experts that router `number` takes, in place of those with the `largest` scores [N, experts]."""
        self._experts = scores.shape[-1]
        if self._recorded is not None:
            self._recorded.append(largest)
        if self.replayed is None:
            return largest
        chosen = self.replayed.unflatten(1, (self._layers, -1))[:, number].long()
        return torch.where(chosen > 0, chosen - 1, largest)


def routers_of(hf: Any) -> Routers:
    """The routers in `hf`, the same ones each time."""
    if "routers" not in vars(hf):
        hf.routers = Routers(hf)
    return hf.routers


class _Choosing(TorchFunctionMode):
    """Inside of the call of a router its top-k is that of `Routers.choose`: the scores remain the router's own."""

    def __init__(self, routers: Routers, number: int) -> None:
        super().__init__()
        self._routers, self._number = routers, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        chosen = self._routers.choose(self._number, args[0], result.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@torch.compiler.disable
def _route(routers: Routers, number: int, router: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of `router`. (No method of its own in an argument: other ranks get the model pickled.)"""
    with _Choosing(routers, number):
        return type(router).forward(router, *args, **kwargs)


def _router_classes(hf: nn.Module) -> Iterator[type]:
    """The classes whose output the models in `hf` name as their routers' logits."""
    for model in hf.modules():
        if isinstance(model, PreTrainedModel):
            named = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
            several = named if isinstance(named, list) else [named]
            yield from (getattr(one, "target_class", one) for one in several if one)
