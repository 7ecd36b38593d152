"""From separate prompt and response columns to the compact rows a causal model reads.

Shapes: b rows, P prompt columns, T response columns, L model positions, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from valor.models.packing import Segments, packing
from valor.models.sequence_parallel import put_together

ROW_FIELDS = ("prompts", "prompt_lengths", "responses", "response_lengths")


@dataclass(frozen=True)
class CompactRows:
    """What the model reads and where its predictions of response tokens lie.

    Response token t of a row with p prompt tokens is predicted at position p - 1 + t, so the last token of a row is
    never an input. Padding is to the right and nothing looks at it: a causal model needs no attention mask. Packed rows
    lie one behind the other in one long row, b = 1, with `position_ids` and the `segments` that they are. Where ranks
    share the positions, L and N are this rank's; `mask` is all ranks', and its first response token is number `begin`
    of `total`.
    """

    input_ids: Tensor  # [b, L] int64
    predictor: Tensor  # [N] int64, index into the flattened [b * L] positions
    targets: Tensor  # [N] int64, the response tokens in row order
    mask: Tensor  # [b, T] bool, true at the N response tokens
    position_ids: Tensor | None = None  # [1, L] int64
    segments: Segments | None = None
    begin: int = 0
    total: int = 0

    def to(self, device: torch.device) -> CompactRows:
        """The same with its tensors on `device`."""
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        segments = self.segments
        if segments is not None and segments.offsets is not None:
            segments = replace(segments, offsets=segments.offsets.to(device))
        return replace(self, **moved, segments=segments)

    def read_by(self, model: Any) -> Any:
        """The output of a transformers model (or its base) on these rows."""
        packed = {} if self.segments is None else {"position_ids": self.position_ids, "segments": self.segments}
        with packing(self.segments):
            return model(input_ids=self.input_ids, use_cache=False, **packed)

    def gather(self, states: Tensor) -> Tensor:
        """The states [b, L, H] at the predicting positions, [N, H]."""
        return states.reshape(-1, states.shape[-1]).index_select(0, self.predictor)

    def scatter(self, flat: Tensor) -> Tensor:
        """Per-token numbers [N, ...] on the [b, T, ...] grid, zero elsewhere; differentiable."""
        if self.segments is not None and self.segments.group is not None:
            flat = put_together(flat, self.begin, self.total, self.segments.group)
        mask = self.mask.view(*self.mask.shape, *[1] * (flat.dim() - 1))
        return flat.new_zeros(*self.mask.shape, *flat.shape[1:]).masked_scatter(mask, flat)


def compact_rows(
    rows: Mapping[str, Tensor], *, packed: bool = False, group: dist.ProcessGroup | None = None
) -> CompactRows:
    """Join prompts [b, P] and responses [b, T] without a gap. A row needs at least one prompt token (ValueError).

    packed: also without padding between rows. group: packed rows that its ranks share position by position. Where the
    rows are on the CPU nothing here waits for a device.
    """
    prompts, responses = rows["prompts"], rows["responses"]
    prompt_lengths, response_lengths = rows["prompt_lengths"], rows["response_lengths"]
    if bool((prompt_lengths < 1).any()):
        raise ValueError("every row needs at least one prompt token: it predicts the first response token")
    length = max(int((prompt_lengths + response_lengths).max()) - 1, 1)
    device = prompts.device

    column = torch.arange(length, device=device)
    p, r = prompt_lengths[:, None], response_lengths[:, None]
    in_response = (column >= p) & (column < p + r)
    source = torch.where(in_response, prompts.shape[1] + column - p, column.clamp(max=prompts.shape[1] - 1))
    ids = torch.cat([prompts, responses], dim=1).gather(1, source)
    ids = ids.masked_fill(column >= p + r, 0)

    step = torch.arange(responses.shape[1], device=device)
    mask = step < r
    start = torch.arange(len(prompts), device=device)[:, None] * length
    if not packed:
        return CompactRows(ids, (start + p - 1 + step)[mask], responses[mask], mask)
    read = (prompt_lengths + response_lengths - 1).clamp(min=1)
    real = column < read[:, None]
    start = (read.cumsum(0) - read)[:, None]
    segments = Segments.of(read.tolist(), device=device)
    positions = column.expand_as(ids)[real][None]
    whole = CompactRows(ids[real][None], (start + p - 1 + step)[mask], responses[mask], mask, positions, segments)
    return whole if group is None else _own_part(whole, read.tolist(), group)


def _own_part(whole: CompactRows, lengths: list[int], group: dist.ProcessGroup) -> CompactRows:
    """This rank's positions of packed rows, as many as any other rank's: a row of padding fills up the last part."""
    assert whole.position_ids is not None
    missing = -sum(lengths) % group.size()
    each = (sum(lengths) + missing) // group.size()
    own = slice(group.rank() * each, (group.rank() + 1) * each)
    ids = torch.nn.functional.pad(whole.input_ids, (0, missing))[:, own]
    filling = torch.arange(missing, device=ids.device)[None]
    positions = torch.cat([whole.position_ids, filling], dim=1)[:, own]
    begin, end = torch.searchsorted(whole.predictor, torch.tensor([own.start, own.stop], device=ids.device)).tolist()
    predictor, targets = whole.predictor[begin:end] - own.start, whole.targets[begin:end]
    segments = Segments.of(lengths + [missing] * (missing > 0), group, ids.device)
    return CompactRows(ids, predictor, targets, whole.mask, positions, segments, begin, len(whole.targets))
