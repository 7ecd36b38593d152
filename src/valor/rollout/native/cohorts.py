"""Generation by a model's own forward pass and cache: for models whose state is more than keys and values, such as
linear attention, short convolutions and Mamba blocks.

Rows of one prompt length make a cohort: they are prefilled together, without padding, and decoded until all have ended.
So no state ever sees a padding token, and every row has the numbers it would have alone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from valor.errors import UserError, out_of_memory
from valor.models.hf import cache_argument, input_device
from valor.models.images import RowImages
from valor.rollout.native.requests import Group, Row
from valor.rollout.sampling import BatchSampler

logger = logging.getLogger(__name__)


class Cohort:
    """Rows of one length, and the cache that `hf` keeps of them; `cached=False`: every step reads all tokens again.
    images: those of the rows, of a model whose cache works."""

    def __init__(self, hf: Any, ids: Tensor, *, cached: bool, images: RowImages | None = None) -> None:
        self._hf, self._ids = hf, ids
        self._cache = DynamicCache(config=hf.config.get_text_config()) if cached else None  # pyright: ignore
        self._name = cache_argument(hf)
        self._unread = ids.shape[1]  # tokens at the end of `ids` that the cache does not hold
        self._images = images
        self._shift: Tensor | None = None  # [B, 1] of the positions behind the images, where these take fewer

    def logits(self) -> Tensor:
        """[B, V] after the last token of each row."""
        length = self._ids.shape[1]
        if self._cache is None:
            return self._hf(input_ids=self._ids, use_cache=False).logits[:, -1]
        positions = torch.arange(length - self._unread, length, device=self._ids.device)[None]
        if self._images is not None:
            return self._prefill(self._images, positions)
        if self._shift is not None:
            positions = positions + self._shift
        inputs = {"input_ids": self._ids[:, length - self._unread :], "position_ids": positions}
        out = self._hf(**inputs, **{self._name: self._cache}, use_cache=True)
        self._unread = 0
        return out.logits[:, -1]

    def _prefill(self, images: RowImages, positions: Tensor) -> Tensor:
        """[B, V] after prompts with images, which only this pass reads."""
        if images.positions is not None:
            positions = images.positions.to(positions.device)
            self._shift = positions.amax((0, 2))[:, None] + 1 - self._ids.shape[1]
        options = {"position_ids": positions, self._name: self._cache, "use_cache": True, "logits_to_keep": 1}
        self._unread, self._images = 0, None
        return images.inputs().to(positions.device).read_by(self._hf, self._ids, **options).logits[:, -1]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order; a row may come more than once."""
        index = torch.tensor(rows, device=self._ids.device)
        self._ids = self._ids[index]
        self._shift = None if self._shift is None else self._shift[index]
        if self._cache is not None:
            self._cache.reorder_cache(index)  # pyright: ignore[reportArgumentType]

    def append(self, tokens: Tensor) -> None:
        """One token [B] for each row."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._unread += 1


@torch.no_grad()
def has_cache(hf: nn.Module) -> bool:
    """Whether decoding from the model's cache gives the logits of a pass over all tokens; a warning where it does not.

    Tried on few tokens, with rows that are taken out and doubled.
    """
    size = len(hf.get_input_embeddings().weight)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    ids = (torch.arange(22, device=input_device(hf)).view(2, 11) * 7919 + 13) % size
    rows = [1, 0, 1]
    try:
        cohort = Cohort(hf, ids[:, :8], cached=True)
        cohort.logits()
        cohort.select(rows)
        for column in range(8, 11):
            cohort.append(ids[rows, column])
            last = cohort.logits()
        expected = Cohort(hf, ids[rows], cached=False).logits()
        error = (last - expected).float().norm() / expected.float().norm()
        reason = None if error <= (1e-4 if last.dtype is torch.float32 else 0.1) else "its cache gives other numbers"
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as problem:
        if out_of_memory(problem):
            raise
        reason = str(problem).partition("\n")[0]
    if reason is not None:
        logger.warning("%s generates without a cache, which is slow: %s", type(hf).__name__, reason)
    return reason is None


def decode(
    hf: nn.Module, groups: Sequence[Group], rows: list[Row], finish: Callable[[Row], bool], *, cached: bool
) -> None:
    """Generate `rows`, the samples of `groups` in order, whose prompts have one length.

    finish: asked of each row after each token; True takes it out. RuntimeError: the logits are not finite. UserError:
    images, and no cache.
    """
    device, ids = input_device(hf), torch.tensor([group.prompt_ids for group in groups])
    images = RowImages.of(hf, ids, [group.images for group in groups])
    if images is not None and not cached:
        raise UserError(f"{type(hf).__name__} has no cache that works, and needs one to answer prompts with images")
    cohort = Cohort(hf, ids.to(device), cached=cached, images=images)
    logits, first = cohort.logits(), [i for i, group in enumerate(groups) for _ in group.members]
    cohort.select(first)
    logits = logits[torch.tensor(first, device=device)]
    while True:
        sampler = BatchSampler([row.request.params for row in rows], device)
        uniforms = torch.from_numpy(np.array([row.uniforms[len(row.token_ids)] for row in rows])).to(device)
        tokens, log_probs = sampler(logits, uniforms)
        if not bool(torch.isfinite(log_probs).all()):
            raise RuntimeError("the policy's logits are not finite: its weights have diverged")
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.add([token], [log_prob])
        cohort.append(tokens)
        going = [i for i, row in enumerate(rows) if not finish(row)]
        if not going:
            return
        if len(going) < len(rows):
            cohort.select(going)
            rows = [rows[i] for i in going]
        logits = cohort.logits()
