"""Hidden states of a policy as numbers that a linear critic reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_EXACT_POSITIONS = 16  # the others share a feature with those up to 9 % further on
_POSITIONS_AN_OCTAVE = 8
_LEAST = -12.0  # log-prob below which all tokens are equally unlikely


@dataclass(frozen=True)
class StateProjection:
    """The hidden states of all layers, each divided by its root mean square, as at most `size` numbers of float32.

    Where they are more, each of them is added with a random sign to one of `size` sums, equally many to each: a sparse
    random projection (feature hashing, https://arxiv.org/abs/0902.2206), which keeps scalar products in expectation.
    """

    size: int

    def __call__(self, layers: Sequence[Tensor]) -> Tensor:
        """[N, K] of layers of [N, H] each."""
        normal = [x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-12).rsqrt() for x in layers]
        total = sum(x.shape[-1] for x in normal)
        if total <= self.size:
            return torch.cat(normal, -1)
        sums = normal[0].new_zeros(len(normal[0]), self.size)
        for number, x in enumerate(normal):
            draw, width = torch.Generator().manual_seed(number), x.shape[-1]
            order = torch.randperm(width + -width % self.size, generator=draw).to(x.device)
            signs = (torch.randint(2, (width,), generator=draw) * 2.0 - 1.0).to(x.device)
            padded = functional.pad(x * signs, (0, len(order) - width))
            sums += padded[:, order].view(len(x), -1, self.size).sum(1)
        return sums * math.sqrt(self.size / total)


def state_features(states: Tensor, log_probs: Tensor, mask: Tensor, longest: int) -> Tensor:
    """[b, T, D] float64 of projected states [b, T, K] before each response token: the state, the mean and the sum
    (divided by `longest`) of the states of the response so far, `_unlikely`, and a 1 for the place in the response of
    at most `longest` tokens. What is masked (observations) counts as part of the response, but its log_probs [b, T] do
    not: they say how far the policy's tokens are from all that the states' model would write."""
    states, width = states.double(), states.shape[1]
    count = torch.arange(1, width + 1, device=states.device)
    total = states.cumsum(1)
    places = functional.one_hot(_place(count).clamp(max=num_places(longest) - 1), num_places(longest))
    parts = [states, total / count[:, None], total / longest, _unlikely(log_probs.double().where(mask != 0, 0.0))]
    return torch.cat([*parts, places.to(states).expand(len(states), -1, -1)], -1)


def _unlikely(log_probs: Tensor) -> Tensor:
    """[b, T, 2] log-prob of the token before each one, and the least so far; 0 before the first."""
    before = functional.pad(log_probs, (1, -1)).clamp(min=_LEAST)
    return torch.stack([before, before.cummin(1).values], -1)


def num_places(longest: int) -> int:
    """Features by which places in a response of at most `longest` tokens are told apart."""
    return int(_place(torch.tensor(longest))) + 1


def _place(count: Tensor) -> Tensor:
    far = _EXACT_POSITIONS - 1 + (_POSITIONS_AN_OCTAVE * (count / _EXACT_POSITIONS).log2()).floor().long()
    return torch.where(count <= _EXACT_POSITIONS, count - 1, far)
