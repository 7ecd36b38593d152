"""Losses of reward models, from scores of preference pairs.

Shapes: B pairs. Tensors are float32.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Per pair [B]: -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2.

    The likelihood that the better response wins (Bradley and Terry 1952); the margin is Llama 2's, arXiv:2307.09288
    eq. 2. Scores matter only up to a constant for each prompt; the second term keeps them around 0 (arXiv:2312.09244
    section 2).
    """
    loss = -functional.logsigmoid(chosen - rejected - margin)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss
