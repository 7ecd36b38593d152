"""From separate prompt and response columns to the compact rows a causal model reads.

Shapes: b rows, P prompt columns, T response columns, L model positions, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from valor.data.batch import Batch
from valor.data.images import IMAGES
from valor.data.positions import rope_limit
from valor.errors import UserError
from valor.models.attention import Segments
from valor.models.hf import disable_dropout, input_device
from valor.models.images import ImageInputs, RowImages, image_sources
from valor.models.packing import PutTogether, enable_packing, packing
from valor.models.routing import ROUTES, Routers, routers_of

_FEWEST_SHARED = 8  # fewer tokens are not worth the copies of keys and values that attention then makes

ROW_FIELDS = ("prompts", "prompt_lengths", "responses", "response_lengths")


@dataclass(frozen=True)
class Sharing:
    """How ranks divide packed rows. `positions`: the sequence-parallel group. `tokens`: ranks that have the same
    positions and compute log-probs of different response tokens; `all`: the ranks of both. `multiple`: what the number
    of a rank's positions is filled up to a multiple of."""

    positions: dist.ProcessGroup | None = None
    tokens: dist.ProcessGroup | None = None
    all: dist.ProcessGroup | None = None
    multiple: int = 1


ALONE = Sharing()


@dataclass(frozen=True)
class CompactRows:
    """What the model reads and where its predictions of response tokens lie.

    Response token t of a row with p prompt tokens is predicted at position p - 1 + t, so the last token of a row is
    never an input. Padding is to the right, where a causal model does not see it. Packed rows are one row, b = 1, with
    `position_ids` and their `segments`; a shared prefix may lie there once. `images`: what is read at image tokens, in
    place of their embeddings; `position_ids` then may be threefold, [3, b, L]. `routes` [b * L, C]: what routers choose
    (`valor.models.routing`). Where ranks divide the rows, L and N are this rank's, in the order of the positions;
    `mask` is all ranks', and this rank's first response token is number `begin` of `total` in the `group`.
    """

    input_ids: Tensor  # [b, L] int64
    predictor: Tensor  # [N] int64, index into the flattened [b * L] positions
    targets: Tensor  # [N] int64, the response tokens in row order
    mask: Tensor  # [b, T] bool, true at the N response tokens
    position_ids: Tensor | None = None  # [1, L] int64
    segments: Segments | None = None
    group: dist.ProcessGroup | None = None
    begin: int = 0
    total: int = 0
    rank: Tensor | None = None  # [total] int64, where ranks divide rows: each response token's number among all ranks'
    images: ImageInputs | None = None
    routes: Tensor | None = None

    def to(self, device: torch.device) -> CompactRows:
        """The same with its tensors on `device`."""
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        segments = None if self.segments is None else self.segments.to(device)
        images = None if self.images is None else self.images.to(device)
        return replace(self, **moved, segments=segments, images=images)

    def read_by(self, model: Any, **options: Any) -> Any:
        """The output of a transformers model (or its base) on these rows."""
        packed = {} if self.segments is None else {"segments": self.segments}
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        options = {"use_cache": False, **positions, **packed, **options}
        with packing(self.segments):
            if self.images is not None:
                return self.images.read_by(model, self.input_ids, **options)
            return model(input_ids=self.input_ids, **options)

    def gather(self, states: Tensor) -> Tensor:
        """The states [b, L, H] at the predicting positions, [N, H]."""
        return states.reshape(-1, states.shape[-1]).index_select(0, self.predictor)

    def scatter(self, flat: Tensor) -> Tensor:
        """[b, T, ...] from per-token numbers [N, ...], 0 elsewhere; differentiable."""
        if self.group is not None:
            flat = PutTogether.apply(flat, self.begin, self.total, self.group)
        if self.rank is not None:
            flat = flat[self.rank]
        mask = self.mask.view(*self.mask.shape, *[1] * (flat.dim() - 1))
        return flat.new_zeros(*self.mask.shape, *flat.shape[1:]).masked_scatter(mask, flat)


class RowReader(nn.Module):
    """Wraps `hf`, a transformers model, to read compact rows.

    packed: without padding, where the architecture allows it. shared: also prefixes of neighbouring rows once.
    """

    sharing = ALONE  # set by the engine
    routers: Routers | None = None  # of a model that replays experts

    def __init__(self, hf: Any, *, packed: bool = False, shared: bool = False) -> None:
        super().__init__()
        disable_dropout(hf)
        self.hf = hf
        self.eval()
        self.packed = packed and enable_packing(hf)
        self.shared = shared and self.packed
        self._longest = rope_limit(hf.config.get_text_config())

    def replay_experts(self) -> None:
        """From now on routers choose what the rows' column `ROUTES` says: for each row by itself, so that no prefixes
        are shared. UserError: they cannot."""
        self.routers, self.shared = routers_of(self.hf), False

    def compact(self, rows: Mapping[str, Tensor]) -> CompactRows:
        """This rank's part of `rows`, on its device. UserError: a row is longer than the rotary embedding allows."""
        longest = int((rows["prompt_lengths"] + rows["response_lengths"]).max())
        if self._longest is not None and longest > self._longest:
            raise UserError(
                f"a row has {longest} tokens, and the rotary embedding of '{self.hf.config.name_or_path}' changes with "
                f"the batch beyond {self._longest}: set the lengths so that no row is longer, or take another model"
            )
        layout = {"packed": self.packed, "shared": self.shared, "sharing": self.sharing}
        images = RowImages.of(self.hf, model_inputs(rows)[0], files) if (files := self._images_of(rows)) else None
        choices = self.routers.choices if self.routers is not None and ROUTES in rows else None
        compact = compact_rows(rows, **layout, images=images, choices=choices).to(input_device(self.hf))
        if self.routers is not None:
            self.routers.replayed = compact.routes
        return compact

    def in_families(self, rows: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
        """As the function of this name."""
        ids, lengths = model_inputs(rows)
        if files := self._images_of(rows):
            ids = told_apart(ids, image_sources(self.hf, ids, files))
        return in_families(ids, lengths)

    def _images_of(self, rows: Any) -> list[str] | None:
        """The files of the rows' images. UserError: prompts have image tokens, and the rows no column of images."""
        if IMAGES in rows:
            return rows.objects[IMAGES]
        token = getattr(self.hf.config, "image_token_id", None)
        if token is not None and bool((rows["prompts"] == token).any()):
            raise UserError("prompts have image tokens, and there are no images with them: set data.image_key")
        return None


def compact_rows(
    rows: Mapping[str, Tensor],
    *,
    packed: bool = False,
    shared: bool = False,
    sharing: Sharing = ALONE,
    images: RowImages | None = None,
    choices: int | None = None,
) -> CompactRows:
    """Joins prompts [b, P] and responses [b, T] without a gap; on the device of the rows, best the CPU.

    packed: without padding between rows. shared: a packed row omits the tokens that it begins with as the row before
    (`shared_beginnings`). sharing: how ranks divide packed rows. images: those of the rows, whose ranks do not divide
    them. choices: C, of rows with `ROUTES`. ValueError: a row without a prompt token.
    """
    prompt_lengths, response_lengths, responses = rows["prompt_lengths"], rows["response_lengths"], rows["responses"]
    if bool((prompt_lengths < 1).any()):
        raise ValueError("every row needs at least one prompt token: it predicts the first response token")
    ids, read = model_inputs(rows)
    device, (count, length) = ids.device, ids.shape
    column = torch.arange(length, device=device)
    step = torch.arange(responses.shape[1], device=device)
    mask = step < response_lengths[:, None]
    last_of_prompt = prompt_lengths[:, None] - 1
    row = torch.arange(count, device=device)[:, None]
    routes = None
    if choices is not None:
        routes = rows[ROUTES][:, : length * choices]
        routes = nn.functional.pad(routes, (0, length * choices - routes.shape[1])).unflatten(1, (length, choices))
    if not packed:
        seen = {} if images is None else {"images": images.inputs(), "position_ids": images.positions}
        seen |= {} if routes is None else {"routes": routes.flatten(0, 1)}
        return CompactRows(ids, (row * length + last_of_prompt + step)[mask], responses[mask], mask, **seen)
    compared = ids if images is None else told_apart(ids, images.source)
    skipped = shared_beginnings(compared, read) if shared else torch.zeros_like(read)
    position = _positions(read - skipped, skipped, length)
    is_read = (column >= skipped[:, None]) & (column < read[:, None])
    predictor = position.gather(1, (last_of_prompt + step).clamp(max=length - 1))[mask]
    segments = Segments.of((read - skipped).tolist(), device=device)
    if bool(skipped.any()):
        segments = segments.reading(read.tolist(), position[column < read[:, None]])
    columns = column.expand_as(ids)[is_read][None]
    seen = None if images is None else images.inputs(images.source[is_read])
    if images is not None and images.positions is not None:
        columns = images.positions[:, None, is_read]
    routes = None if routes is None else routes[is_read]
    inputs = {"position_ids": columns, "segments": segments, "images": seen, "routes": routes}
    rows_of_all = CompactRows(ids[is_read][None], predictor, responses[mask], mask, **inputs)
    return rows_of_all if sharing == ALONE else _divided(rows_of_all, sharing)


def model_inputs(rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Prompt and response without the last token: ids [b, L], 0 beyond the lengths [b], which are at least 1."""
    prompts, responses = rows["prompts"], rows["responses"]
    p, total = rows["prompt_lengths"][:, None], rows["prompt_lengths"] + rows["response_lengths"]
    length = max(int(total.max()) - 1, 1)
    column = torch.arange(length, device=prompts.device)
    in_response = (column >= p) & (column < total[:, None])
    source = torch.where(in_response, prompts.shape[1] + column - p, column.clamp(max=prompts.shape[1] - 1))
    ids = torch.cat([prompts, responses], dim=1).gather(1, source)
    return ids.masked_fill(column >= total[:, None], 0), (total - 1).clamp(min=1)


def model_rows(batch: Batch) -> Batch:
    """The columns that a model reads."""
    return batch.select([*ROW_FIELDS, *(name for name in (IMAGES, ROUTES) if name in batch)])


def told_apart(ids: Tensor, source: Tensor) -> Tensor:
    """Ids [b, L] to compare rows by: at images, a number for each feature (`RowImages.source`) below all ids."""
    return torch.where(source >= 0, -1 - source, ids)


def shared_beginnings(ids: Tensor, lengths: Tensor) -> Tensor:
    """[b] length of the prefix that a row of `ids` [b, L] shares with the row before it; 0 where it is too short."""
    column = torch.arange(ids.shape[1], device=ids.device)
    equal = (ids[1:] == ids[:-1]) & (column < torch.minimum(lengths[1:], lengths[:-1])[:, None])
    shared = torch.cat([lengths.new_zeros(1), equal.to(torch.int8).cummin(1).values.sum(1)])
    return shared.masked_fill(shared < _FEWEST_SHARED, 0)


def in_families(ids: Tensor, lengths: Tensor) -> tuple[list[int], list[int]]:
    """An order in which rows with a common prefix are neighbours, and the length that each shares with the row before.
    Families are ordered from long to short rows, ties as they come."""
    data, sizes = ids.cpu().numpy().astype(">i4"), lengths.tolist()  # big-endian: bytes sort as the tokens do
    order = sorted(range(len(sizes)), key=lambda row: data[row, : sizes[row]].tobytes())
    shared = shared_beginnings(ids[order], lengths[order]).tolist()
    families: list[list[tuple[int, int]]] = []
    for row, count in zip(order, shared, strict=True):
        if not count:
            families.append([])
        families[-1].append((row, count))
    families.sort(key=lambda family: (-max(sizes[row] for row, _ in family), min(family)[0]))
    flat = [member for family in families for member in family]
    return [row for row, _ in flat], [count for _, count in flat]


def _positions(count: Tensor, skipped: Tensor, length: int) -> Tensor:
    """[b, L] position of token c of row i, in the last row up to i that does not skip it; count [b]: tokens of a row
    that are not skipped."""
    start = count.cumsum(0) - count - skipped
    column = torch.arange(length, device=count.device)
    row = torch.arange(len(count), device=count.device)[:, None]
    holder = torch.where(column >= skipped[:, None], row, 0).cummax(0).values
    return start[holder] + column


def _divided(rows: CompactRows, sharing: Sharing) -> CompactRows:
    """This rank's positions of packed rows, as many as any other rank's: a row of padding fills up the last part."""
    assert rows.position_ids is not None and rows.segments is not None
    group = sharing.positions
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    tokens = rows.input_ids.shape[1]
    missing = -tokens % (ranks * sharing.multiple)
    each = (tokens + missing) // ranks
    part = slice(rank * each, (rank + 1) * each)
    ids = nn.functional.pad(rows.input_ids, (0, missing))[:, part]
    padding = torch.arange(missing, device=ids.device)[None]
    positions = torch.cat([rows.position_ids, padding], dim=1)[:, part]
    by_position = rows.predictor.sort(stable=True)
    ends = torch.tensor([part.start, part.stop], device=ids.device)
    begin, end = torch.searchsorted(by_position.values, ends).tolist()
    if sharing.tokens is not None:
        share = -(-(end - begin) // sharing.tokens.size())
        begin = min(begin + sharing.tokens.rank() * share, end)
        end = min(begin + share, end)
    predictor, targets = by_position.values[begin:end] - part.start, rows.targets[by_position.indices[begin:end]]
    segments, total = rows.segments.shared_out(group, missing), len(rows.targets)
    routes = None if rows.routes is None else nn.functional.pad(rows.routes, (0, 0, 0, missing))[part]
    back = by_position.indices.argsort()
    where = {"group": sharing.all or group, "begin": begin, "total": total, "rank": back, "routes": routes}
    return CompactRows(ids, predictor, targets, rows.mask, positions, segments, **where)
