"""Log-probabilities of given tokens, entropies and exact KL divergences without a float32 [N, V] matrix.

Shapes: N tokens, H hidden size, V vocabulary. The head is multiplied in the dtype of the hidden states; everything
after it is float32, a few rows at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from valor.algorithms.reductions import LOWEST_LOG_PROB
from valor.models.linear import product, weight_gradient

# Elements of one head product (kept for the backward pass when it is the only one), and of one float32 softmax block
# (small enough on a CPU to stay in its cache). In elements, per device type.
_PRODUCT_ELEMENTS = {"cpu": 2**27, "cuda": 2**29}
_SOFTMAX_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}

# Of two distributions, log-probs [n, V] each, a number [n] each with a gradient in the first.
Divergence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LogitMap:
    """What an architecture does to the head's product x: cap * tanh(scale * x / cap), or scale * x without a cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, x: Tensor) -> Tensor:
        """The model's logits from the head's product, in place where that saves a copy."""
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        if self.softcap is not None:
            x = x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x


class HeadProduct(NamedTuple):
    """hidden [N, H] · weight [V, H]ᵀ + bias [V], of which only some rows at a time are ever computed. Without a weight
    hidden [N, V] is the product already.

    logit_map, temperature: how a reference's product becomes its distribution; None: as the policy's does.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    logit_map: LogitMap | None = None
    temperature: float | None = None

    @property
    def vocabulary(self) -> int:
        return len(self.weight) if self.weight is not None else self.hidden.shape[1]

    def first(self, tokens: int) -> "HeadProduct":
        """That of the first `tokens` of the vocabulary alone; others are what a head is filled up with."""
        if tokens == self.vocabulary:
            return self
        assert tokens < self.vocabulary, "a reference knows every token of the policy"
        if self.weight is None:
            return self._replace(hidden=self.hidden[:, :tokens])
        return self._replace(weight=self.weight[:tokens], bias=None if self.bias is None else self.bias[:tokens])

    def rows(self, rows: slice) -> Tensor:
        """A new tensor [n, V]."""
        if self.weight is None:
            return self.hidden[rows].clone()
        return product(self.hidden[rows], self.weight, self.bias)

    def rows_per(self, elements: dict[str, int]) -> int:
        """How many rows have so many `elements`, by type of device."""
        return max(1, elements["cpu" if self.hidden.device.type == "cpu" else "cuda"] // self.vocabulary)


class TokenNumbers(NamedTuple):
    """Of N positions, each [N] float32: log π of the target; if asked, π's entropy and KL(π ‖ π_ref), or the divergence
    asked for in its place."""

    log_probs: Tensor
    entropy: Tensor | None = None
    full_kl: Tensor | None = None


def token_log_probs(
    product: HeadProduct,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logit_map: LogitMap | None = None,
    with_entropy: bool = False,
    reference: HeadProduct | None = None,
    divergence: Divergence | None = None,
) -> TokenNumbers:
    """Numbers of π = softmax(logits / temperature) at `targets` [N]; with a `reference`, the exact KL to it, or the
    `divergence` of π and it.

    Differentiable in the product's hidden, weight and bias; the reference is a constant.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    reference = reference and reference.first(product.vocabulary)
    log_probs, entropy, full_kl = _TokenLogProbs.apply(
        *product[:3], targets, temperature, logit_map or LogitMap(), with_entropy, reference, divergence
    )
    return TokenNumbers(log_probs, entropy if with_entropy else None, full_kl if reference else None)


@torch.no_grad()
def sum_pi_squared(product: HeadProduct, *, temperature: float = 1.0, logit_map: LogitMap | None = None) -> Tensor:
    """Σ_v π(v)² [N] of π = softmax(logits / temperature), float32, without gradient."""
    hidden = product.hidden
    out = hidden.new_empty(len(hidden), dtype=torch.float32)
    rows = product.rows_per(_SOFTMAX_ELEMENTS)
    for start in range(0, len(hidden), rows):
        log_p = _log_softmax(product.rows(slice(start, start + rows)), temperature, logit_map or LogitMap())
        out[start : start + rows] = log_p.mul_(2.0).exp_().sum(1)
    return out


@torch.no_grad()
def likeliest(product: HeadProduct) -> Tensor:
    """The token [N] of the largest logit: what a `LogitMap` does keeps the order."""
    count = len(product.hidden)
    rows = product.rows_per(_PRODUCT_ELEMENTS)
    return torch.cat([product.rows(slice(i, i + rows)).argmax(1) for i in range(0, max(count, 1), rows)])


class _TokenLogProbs(torch.autograd.Function):
    """Saves the heads' products when they are small, else recomputes them going back."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        logit_map: LogitMap,
        with_entropy: bool,
        reference: HeadProduct | None,
        divergence: Divergence | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, head = len(hidden), HeadProduct(hidden, weight, bias)
        product_rows, block_rows = (head.rows_per(size) for size in (_PRODUCT_ELEMENTS, _SOFTMAX_ELEMENTS))
        log_probs = hidden.new_empty(n, dtype=torch.float32)
        entropy = hidden.new_empty(n if with_entropy else 0, dtype=torch.float32)
        full_kl = hidden.new_empty(n if reference else 0, dtype=torch.float32)
        product: Tensor | None = None
        other: Tensor | None = None
        of_reference = _read_by(reference, temperature, logit_map)
        for start in range(0, n, product_rows):
            rows = slice(start, start + product_rows)
            product = head.rows(rows)
            other = reference.rows(rows) if reference else None
            for at in range(0, len(product), block_rows):
                block = slice(at, at + block_rows)
                rows = slice(start + at, start + at + len(product[block]))
                log_p = _log_softmax(product[block], temperature, logit_map)
                log_probs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
                if with_entropy or other is not None:
                    log_p.clamp_(min=LOWEST_LOG_PROB)
                if with_entropy:
                    entropy[rows] = -(log_p.exp().mul_(log_p)).sum(1)
                if other is not None:
                    log_q = _log_softmax(other[block], *of_reference).clamp_(min=LOWEST_LOG_PROB)
                    if divergence is not None:
                        full_kl[rows] = divergence(log_p, log_q)
                    else:
                        gap = log_p - log_q
                        full_kl[rows] = log_p.exp_().mul_(gap).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, full_kl)
        ctx.reference, ctx.divergence = reference, divergence
        ctx.products = (product, other) if n <= product_rows else None
        ctx.options = (temperature, logit_map, product_rows, block_rows)
        return log_probs, entropy, full_kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, full_kl = ctx.saved_tensors
        temperature, logit_map, product_rows, block_rows = ctx.options
        reference: HeadProduct | None = ctx.reference
        of_reference = _read_by(reference, temperature, logit_map)
        grad_log_probs, grad_entropy, grad_full_kl = grads  # zeros where nothing was read of one
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        products, ctx.products = ctx.products, None  # overwritten below; a second backward pass recomputes them

        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, len(hidden), product_rows):
            rows = slice(start, start + product_rows)
            h = hidden[rows]
            delta, other = products or (
                HeadProduct(hidden, weight, bias).rows(rows),
                reference.rows(rows) if reference else None,
            )
            for at in range(0, len(delta), block_rows):
                block = delta[at : at + block_rows]
                inner = slice(start + at, start + at + len(block))
                pulls, more = [], None
                if len(grad_entropy):
                    pulls.append((None, entropy[inner], -grad_entropy[inner]))
                if other is not None:
                    log_q = _log_softmax(other[at : at + block_rows], *of_reference).clamp_(min=LOWEST_LOG_PROB)
                    if ctx.divergence is None:
                        pulls.append((log_q, -full_kl[inner], grad_full_kl[inner]))
                    else:
                        log_p = _log_softmax(block, temperature, logit_map)
                        more = _divergence_gradient(ctx.divergence, log_p, log_q, grad_full_kl[inner])
                block.copy_(
                    _logit_gradient(block, targets[inner], grad_log_probs[inner], pulls, more, temperature, logit_map)
                )
            if grad_hidden is not None:
                grad_hidden[rows] = delta if weight is None else product(delta, weight.t())
            if need_weight:
                grad_weight = _accumulate(grad_weight, weight_gradient(delta, h), last=rows.stop >= len(hidden))
            if need_bias:
                grad_bias = _accumulate(grad_bias, delta.float().sum(0), last=True)
        # Zeros without any token: ranks of a group must agree about which gradients there are.
        if need_weight and weight is not None:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        if need_bias and bias is not None:
            grad_bias = torch.zeros_like(bias) if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _read_by(reference: HeadProduct | None, temperature: float, logit_map: LogitMap) -> tuple[float, LogitMap]:
    """Temperature and logit map of a reference's distribution."""
    if reference is None:
        return temperature, logit_map
    return reference.temperature or temperature, reference.logit_map or logit_map


def _log_softmax(product: Tensor, temperature: float, logit_map: LogitMap) -> Tensor:
    """float32 log softmax(logits / temperature) of a block of the head's product, which stays as it is."""
    if temperature == 1.0 and logit_map == LogitMap():
        return torch.log_softmax(product, dim=1, dtype=torch.float32)
    logits = logit_map.apply_(product.to(torch.float32, copy=True))
    return torch.log_softmax(logits.div_(temperature), dim=1)


def _logit_gradient(
    product: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor,
    pulls: list[tuple[Tensor | None, Tensor, Tensor]],
    more: Tensor | None,
    temperature: float,
    logit_map: LogitMap,
) -> Tensor:
    """d loss / d product of a block, float32.

    d log p_t / d z_j = [j = t] - p_j, for z = logits / temperature. `pulls` are (log q, -KL, d loss / d KL):
    d KL(p ‖ q) / d z_j = p_j (log p_j - log q_j - KL); the entropy is -KL for log q = 0. more: a further d loss / d z.
    """
    log_p = _log_softmax(product, temperature, logit_map)
    if not pulls:
        delta = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        delta = -grad_log_probs[:, None]
        log_p.clamp_(min=LOWEST_LOG_PROB)
        for log_q, minus_kl, grad in pulls:
            gap = log_p if log_q is None else log_p - log_q
            delta = (gap + minus_kl[:, None]).mul_(grad[:, None]).add_(delta)
        delta.mul_(log_p.exp_())
    delta.scatter_add_(1, targets[:, None], grad_log_probs[:, None].to(delta.dtype))
    if more is not None:
        delta.add_(more)
    if temperature != 1.0:
        delta.div_(temperature)
    if logit_map.softcap is not None:
        logits = logit_map.apply_(product.to(torch.float32, copy=True))
        delta.mul_(1.0 - (logits / logit_map.softcap).square_())
    if logit_map.scale != 1.0:
        delta.mul_(logit_map.scale)
    return delta


def _divergence_gradient(divergence: Divergence, log_p: Tensor, log_q: Tensor, grad: Tensor) -> Tensor:
    """d loss / d z of a block, float32: g_j - p_j Σ_k g_k for g = d loss / d log p."""
    with torch.enable_grad():
        leaf = log_p.detach().requires_grad_()
        (g,) = torch.autograd.grad(divergence(leaf, log_q), leaf, grad)
    return g.sub_(log_p.exp_().mul_(g.sum(1, keepdim=True)))


def _accumulate(total: Tensor | None, part: Tensor, *, last: bool) -> Tensor:
    """Sum in float32 when there is more than one part."""
    if total is None:
        return part if last else part.float()
    return total.add_(part)
