"""Choosing tokens: counter-based random numbers and inverse-CDF sampling.

One uniform number per token decides it, and depends on the request's seed and the token's index alone (Philox, Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), not on the rest of the batch or the rank.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from valor.rollout.base import SamplingParams

# Columns per partial sum of the two-level search (128 to 512 cost the same).
BLOCK = 256
# First try for top-p: the most probable tokens usually hold the nucleus, so that no full sort is needed.
NUCLEUS_CANDIDATES = 1024


def uniform_stream(seed: Sequence[int], count: int) -> np.ndarray:
    """The first `count` uniforms in [0, 1) of the stream that `seed` names, float64 [count].

    Element t is the same for every `count` > t. The seed tuple is hashed, so nearby seeds give unrelated streams.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(seed)}q", *seed), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class BatchSampler:
    """Samples one token for every row of a batch whose rows have their own parameters.

    Built anew when the rows change. `params` has one entry per row.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        scales = [1.0 if p.greedy else p.temperature for p in params]
        self._scales = torch.tensor(scales, device=device)[:, None] if any(s != 1.0 for s in scales) else None
        greedy = [i for i, p in enumerate(params) if p.greedy]
        self._greedy_rows = torch.tensor(greedy, device=device) if greedy else None
        self._all_greedy = len(greedy) == len(params)
        cut = [i for i, p in enumerate(params) if p.truncates]
        self._cut_rows = torch.tensor(cut, device=device) if cut else None
        self._top_k = torch.tensor([params[i].top_k for i in cut], device=device)
        self._top_p = torch.tensor([params[i].top_p for i in cut], device=device)

    def __call__(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B] and their float32 log-probabilities [B].

        `logits` [B, V] of any float type, `uniforms` float64 [B] in [0, 1). The log-probabilities are those of
        softmax(logits / temperature) before truncation; greedy rows use temperature 1.
        """
        scores = logits.float()
        if self._scales is not None:
            scores = scores / self._scales
        probs = torch.softmax(scores, dim=-1)
        if self._all_greedy:
            tokens = scores.argmax(dim=-1)
        else:
            weights = probs
            if self._cut_rows is not None:
                weights = probs.clone()
                weights[self._cut_rows] = truncate(probs[self._cut_rows], self._top_k, self._top_p)
            tokens = search_cdf(weights, uniforms)
            if self._greedy_rows is not None:
                tokens[self._greedy_rows] = scores[self._greedy_rows].argmax(dim=-1)
        return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()


def search_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token t of each row whose interval of the cumulative weights holds uniform * total; int64 [B].

    `weights` float32 [B, V], not negative, need not sum to one; `uniforms` float64 [B] in [0, 1). A token of weight
    zero is never chosen. Sums in float64, of a large vocabulary over blocks of columns and then inside one block:
    float64 over all of it is never made.
    """
    rows, vocab = weights.shape
    if vocab <= 2 * BLOCK:
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        return first_above(cdf, uniforms * cdf[:, -1])
    if vocab % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, BLOCK - vocab % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    block_cdf = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = uniforms * block_cdf[:, -1]
    block = first_above(block_cdf, target)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    inside = blocks[torch.arange(rows, device=weights.device), block].double().cumsum(dim=-1)
    # The bound matters for weights that are not numbers alone; the caller hears of those by their log-probability.
    return (block * BLOCK + first_above(inside, target - before)).clamp(max=vocab - 1)


def first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Index of the first column of non-decreasing `cdf` [B, N] that exceeds `target` [B]; int64 [B].

    Rounding can leave a target at or over the last value: it is brought down, so that the answer is always a column
    at which the cumulative sum rises.
    """
    target = torch.minimum(target, cdf[:, -1] * (1 - 2.0**-50))
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(1).clamp(max=cdf.shape[1] - 1)


def truncate(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`probs` [B, V] with everything outside the top-k, then outside the top-p nucleus of the rest, set to zero.

    `top_k` int64 [B] (<= 0: off), `top_p` float32 [B] (1: off). The nucleus is the smallest set of most probable
    tokens whose share of the remaining mass reaches top_p (Holtzman et al. 2020). Ties with its last token are kept.
    Not renormalised.
    """
    vocab = probs.shape[1]
    result = torch.zeros_like(probs)
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    rows = torch.arange(probs.shape[0], device=probs.device)
    size = int(k.max()) if bool((k < vocab).all()) else NUCLEUS_CANDIDATES
    while rows.numel():
        size = min(size, vocab)
        ranked = probs[rows].topk(size, dim=-1).values
        least, sufficed = _least_inside(ranked, probs[rows].sum(dim=-1), k[rows], top_p[rows], vocab)
        done = rows[sufficed]
        result[done] = torch.where(probs[done] >= least[sufficed][:, None], probs[done], 0.0)
        rows, size = rows[~sufficed], vocab
    return result


def _least_inside(ranked: Tensor, total: Tensor, k: Tensor, top_p: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Least probability inside the truncation [B], and whether the largest ones `ranked` [B, size] show it [B]."""
    size = ranked.shape[1]
    cut = k < vocab
    cumulative = ranked.double().cumsum(dim=-1)
    last = (k.clamp(max=size) - 1)[:, None]
    mass = torch.where(cut, cumulative.gather(1, last).squeeze(1), total.double())
    # Rounding may leave the sum of everything just short of the goal: then everything stays.
    goal = torch.where(top_p < 1, top_p.double() * mass, torch.inf)
    reached = cumulative >= goal[:, None]
    first = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), size - 1)
    position = torch.minimum(first, torch.where(cut, last.squeeze(1), size - 1))
    sufficed = torch.where(cut, k <= size, reached.any(dim=-1)) | (size == vocab)
    return ranked.gather(1, position[:, None]).squeeze(1), sufficed
