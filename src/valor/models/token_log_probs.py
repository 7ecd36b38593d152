"""Log-probabilities and entropies of given tokens without a float32 [N, V] matrix.

Shapes: N tokens, H hidden size, V vocabulary. The head is multiplied in the dtype of the hidden states; everything
after it is float32, a few rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements of one head product (kept for the backward pass when it is the only one), and of one float32 softmax block
# (small enough on a CPU to stay in its cache). In elements, per device type.
_PRODUCT_ELEMENTS = {"cpu": 2**27, "cuda": 2**29}
_SOFTMAX_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}


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


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logit_map: LogitMap | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[targets] [N] and, if asked, the entropy [N] of that distribution, float32.

    `hidden` [N, H], `weight` [V, H], `bias` [V] or None, `targets` [N]. Differentiable in hidden, weight and bias.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    log_probs, entropy = _TokenLogProbs.apply(
        hidden, weight, bias, targets, temperature, logit_map or LogitMap(), with_entropy
    )
    return log_probs, entropy if with_entropy else None


def log_probs_from_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same two numbers from finished logits [N, V], by plain autograd."""
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


@torch.no_grad()
def sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    temperature: float = 1.0,
    logit_map: LogitMap | None = None,
) -> Tensor:
    """Σ_v π(v)² [N] of π = softmax(logits / temperature), float32, without gradient; inputs as in `token_log_probs`."""
    out = hidden.new_empty(len(hidden), dtype=torch.float32)
    rows = _rows_per(_SOFTMAX_ELEMENTS, hidden, len(weight))
    for start in range(0, len(hidden), rows):
        product = _head(hidden[start : start + rows], weight, bias)
        log_p = _log_softmax(product, temperature, logit_map or LogitMap())
        out[start : start + rows] = log_p.mul_(2.0).exp_().sum(1)
    return out


class _TokenLogProbs(torch.autograd.Function):
    """Saves the head's product when it is small, else only its log-normalizers, and recomputes it going back."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        logit_map: LogitMap,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        n, vocab = len(hidden), len(weight)
        product_rows, block_rows = (
            _rows_per(_PRODUCT_ELEMENTS, hidden, vocab),
            _rows_per(_SOFTMAX_ELEMENTS, hidden, vocab),
        )
        log_probs = hidden.new_empty(n, dtype=torch.float32)
        entropy = hidden.new_empty(n if with_entropy else 0, dtype=torch.float32)
        product: Tensor | None = None
        for start in range(0, n, product_rows):
            product = _head(hidden[start : start + product_rows], weight, bias)
            for at in range(0, len(product), block_rows):
                rows = slice(start + at, start + at + len(product[at : at + block_rows]))
                log_p = _log_softmax(product[at : at + block_rows], temperature, logit_map)
                log_probs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
                if with_entropy:
                    entropy[rows] = -(log_p.exp().mul_(log_p)).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.product = product if n <= product_rows else None
        ctx.options = (temperature, logit_map, product_rows, block_rows)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        temperature, logit_map, product_rows, block_rows = ctx.options
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(targets, dtype=torch.float32)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        kept, ctx.product = ctx.product, None  # overwritten below; a second backward pass recomputes it

        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        sums: list[Tensor | None] = [None, None]
        for start in range(0, len(hidden), product_rows):
            rows = slice(start, start + product_rows)
            h = hidden[rows]
            delta = kept if kept is not None else _head(h, weight, bias)
            for at in range(0, len(delta), block_rows):
                block = delta[at : at + block_rows]
                inner = slice(start + at, start + at + len(block))
                block.copy_(
                    _logit_gradient(
                        block,
                        targets[inner],
                        grad_log_probs[inner],
                        grad_entropy[inner] if grad_entropy is not None and len(grad_entropy) else None,
                        entropy[inner],
                        temperature,
                        logit_map,
                    )
                )
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[rows])
            if need_weight:
                sums[0] = _accumulate(sums[0], delta.t() @ h, last=rows.stop >= len(hidden))
            if need_bias:
                sums[1] = _accumulate(sums[1], delta.float().sum(0), last=True)
        grad_weight = None
        if need_weight:  # zeros without any token: ranks of a group must agree about which gradients there are
            grad_weight = sums[0].to(weight.dtype) if sums[0] is not None else torch.zeros_like(weight)
        grad_bias = None
        if need_bias:
            grad_bias = sums[1].to(bias.dtype) if sums[1] is not None else torch.zeros_like(bias)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _rows_per(elements: dict[str, int], like: Tensor, vocab: int) -> int:
    return max(1, elements["cpu" if like.device.type == "cpu" else "cuda"] // vocab)


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())


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
    grad_entropy: Tensor | None,
    entropy: Tensor,
    temperature: float,
    logit_map: LogitMap,
) -> Tensor:
    """d loss / d product of a block, float32.

    d log p_t / d z_j = [j = t] - p_j and d entropy / d z_j = -p_j (log p_j + entropy), for z = logits / temperature.
    """
    log_p = _log_softmax(product, temperature, logit_map)
    if grad_entropy is None:
        delta = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        p = log_p.exp()
        weight = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        delta = p.mul_(weight).neg_()
    delta.scatter_add_(1, targets[:, None], grad_log_probs[:, None].to(delta.dtype))
    if temperature != 1.0:
        delta.div_(temperature)
    if logit_map.softcap is not None:
        logits = logit_map.apply_(product.to(torch.float32, copy=True))
        delta.mul_(1.0 - (logits / logit_map.softcap).square_())
    if logit_map.scale != 1.0:
        delta.mul_(logit_map.scale)
    return delta


def _accumulate(total: Tensor | None, part: Tensor, *, last: bool) -> Tensor:
    """Sum in float32 when there is more than one part."""
    if total is None:
        return part if last else part.float()
    return total.add_(part)
