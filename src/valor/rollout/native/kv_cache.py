"""Key-value memory of the native engine, behind the calls that transformers models make on a cache.

`PromptCache` receives one prefill. `SlotCache` holds the sequences in decoding, a row of columns for each; the compiled
loops also read a prompt that several samples share from one place. Nothing is padded on the left, so positions follow
from lengths alone, and rows can join, leave and be moved without touching the others.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

# Columns are added in chunks, at least half as many again as there are, so that copies stay rare.
MIN_GROWTH = 128
# Compiled loops: keys of a block; multiple to which sizes are filled up.
BLOCK, SIMD_WIDTH = 64, 8
# Columns that a step of a cache in few sizes reads: a multiple of this.
BUCKET = 128


def free_bytes(device: torch.device) -> int | None:
    """Memory that new tensors can have on a CUDA device, torch's unused reserve included; None elsewhere."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class PromptCache(Cache):
    """Keys and values of one prefill: per layer two of [prompts, kv heads, columns, head size]."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.states[layer_idx] = key_states, value_states
        return key_states, value_states


class Columns:
    """Growing per-layer buffers of keys and values, each [rows, kv heads, columns, head size].

    `blocked`: keys are [rows, kv heads, columns / BLOCK, head size, BLOCK], in which a query's products with
    neighbouring keys read neighbouring numbers.
    """

    def __init__(self, blocked: bool) -> None:
        self.blocked = blocked
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = 0
        self.columns = 0

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many rows and columns, keeping what is stored."""
        if rows <= self.rows and columns <= self.columns:
            return
        if columns > self.columns:
            columns = max(columns, self.columns + max(MIN_GROWTH, self.columns // 2))
            self.columns = columns + -columns % BLOCK
        self.rows = max(rows, self.rows)
        for layer, buffers in self.layers.items():
            self.layers[layer] = self._new(buffers)
            for new, old in zip(self.layers[layer], buffers, strict=True):
                new[: old.shape[0], :, : old.shape[2]] = old

    def layer(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The buffers of a layer; new ones have heads, size and dtype of `like` [_, kv heads, _, head size]."""
        if layer not in self.layers:
            self.layers[layer] = self._new(like)
        return self.layers[layer]

    def fill(self, layer: int, rows: slice, states: tuple[Tensor, Tensor]) -> None:
        """Keys and values [kv heads, length, head size] as the first columns of `rows`."""
        keys, values = self.layer(layer, (states[0][None], states[1][None]))
        length = states[0].shape[1]
        values[rows, :, :length] = states[1]
        if self.blocked:
            blocks = F.pad(states[0], (0, 0, 0, -length % BLOCK)).unflatten(1, (-1, BLOCK)).mT
            keys[rows, :, : blocks.shape[1]] = blocks
        else:
            keys[rows, :, :length] = states[0]

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first columns of row `source` over row `target`."""
        for buffer in chain.from_iterable(self.layers.values()):
            used = columns if buffer.dim() == 4 else -(-columns // BLOCK)
            buffer[target, :, :used] = buffer[source, :, :used]

    def _new(self, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # Zeros, because a column may be read before it is written: its attention weight is 0, but 0 * NaN is NaN.
        keys, values = (x.new_zeros(self.rows, x.shape[1], self.columns, x.shape[3]) for x in like)
        return keys.unflatten(2, (-1, BLOCK)).mT.contiguous() if self.blocked else keys, values


class SlotCache(Cache):
    """Rows in decoding. The engine says with `arrange` which prompt each row continues, with `advance` that a step
    begins, and attention reads the state of that step from here.

    `shared`: prompts are stored once for all rows that continue them, which only compiled loops can read. Else they are
    copied into these rows: less work per step for short prompts and single samples. `bucketed`: steps have few sizes,
    so that each can be captured: B is filled up with rows that nobody reads, `width` to a multiple of BUCKET.

    State: `prompt_lengths` and `prompt_width` (longest) of the shared prompts; `prompt_of` [B] the prompt of each row
    and `starts` [B] its length, 0 where it is part of the row; `width` columns of the rows, the new token's included;
    `even`: all rows are equally long. At addresses that never change: `fed` [B] the tokens of a captured step,
    `positions` [B] of the new tokens and `write_at` [B] their columns. `captured`: steps over the present buffers, by B
    and width (valor.rollout.native.replays).
    """

    def __init__(self, max_rows: int, shared: bool, blocked: bool = False, bucketed: bool = False) -> None:
        super().__init__(layers=[])
        self.shared = shared
        self.prompts, self.own = Columns(blocked), Columns(blocked)
        self.max_rows = max_rows
        self.prompt_lengths: list[int] = []
        self.width = self._longest = 0
        self._bucketed = bucketed
        self._state: Tensor | None = None  # [3, max_rows]: fed, positions, write_at
        self._index: dict[int, Tensor] = {}
        self.captured: dict[tuple[int, int], Any] = {}

    def reserve_prompts(self, count: int, longest: int) -> None:
        """Make room for `count` more prompts of up to `longest` tokens."""
        if self.shared:
            self.prompts.reserve(len(self.prompt_lengths) + count, longest)
        else:
            self.own.reserve(self.max_rows, longest + MIN_GROWTH)

    def add_prompt(self, prefill: PromptCache, index: int, length: int, rows: slice) -> int:
        """Store the first `length` columns of prompt `index` of a prefill for `rows`.

        Returns the number of the prompt, or -1 when prompts are not shared.
        """
        number, store = -1, self.own
        if self.shared:
            number, store = len(self.prompt_lengths), self.prompts
            rows = slice(number, number + 1)
            self.prompt_lengths.append(length)
        for layer, (keys, values) in prefill.states.items():
            store.fill(layer, rows, (keys[index, :, :length], values[index, :, :length]))
        return number

    def drop_prompt(self, number: int) -> int:
        """Forget a prompt; the last one takes its number. Returns the number that the last one had."""
        last = len(self.prompt_lengths) - 1
        if number != last:
            self.prompts.move(last, number, self.prompt_lengths[last])
            self.prompt_lengths[number] = self.prompt_lengths[last]
        self.prompt_lengths.pop()
        return last

    def arrange(self, prompt_of: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Row b continues prompt `prompt_of[b]` and has `lengths[b]` columns."""
        starts = [self.prompt_lengths[prompt] for prompt in prompt_of] if self.shared else [0] * len(prompt_of)
        self.starts = torch.tensor(starts, device=device)
        self.prompt_of = torch.tensor(prompt_of, device=device)
        if self._state is None:
            self._state = torch.zeros(3, self.max_rows, dtype=torch.long, device=device)
        rows = _filled_up(len(lengths), self.max_rows) if self._bucketed else len(lengths)
        unread = [-1] * (rows - len(lengths))
        positions = [start + n - 1 for start, n in zip(starts, lengths, strict=True)]
        self._state[1:, :rows].copy_(torch.tensor([positions + unread, [n - 1 for n in lengths] + unread]))
        self.fed, self.positions, self.write_at = self._state[:, :rows]
        self._longest = self.width = max(lengths)
        self.even = min(lengths) == max(lengths) and not self._bucketed
        self.prompt_width = max(starts)

    def advance(self) -> None:
        """Begin a step: every row gets one more column."""
        assert self._state is not None, "rows are arranged first"
        self._state[1:].add_(1)
        self._longest += 1
        self.width = self._longest + (-self._longest % BUCKET if self._bucketed else 0)
        columns = self.own.columns
        self.own.reserve(self.max_rows, self.width)
        if self.own.columns != columns:
            self.captured.clear()
        self._index.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write each row's new column; returns the rows' columns so far, [B, kv heads, width, head size]."""
        rows, new_states = key_states.shape[0], (key_states, value_states)
        buffers = self.own.layer(layer_idx, new_states)
        for buffer, new in zip(buffers, new_states, strict=True):
            if self.even:
                buffer[:rows, :, self.width - 1] = new.squeeze(2)
            else:
                flat = buffer.view(-1, buffer.shape[3])
                flat.index_copy_(0, self._columns(buffer.shape[1]), new.reshape(-1, buffer.shape[3]))
        keys, values = (buffer[:rows, :, : self.width] for buffer in buffers)
        return keys, values

    def forget(self) -> None:
        """The present step will be computed again, from `positions` and `write_at` alone."""
        self._index.clear()

    def _columns(self, heads: int) -> Tensor:
        """Index of each (row, head)'s new column among all columns of all rows, int64 [B * heads]."""
        if heads not in self._index:
            device = self.write_at.device
            first = torch.arange(self.write_at.shape[0] * heads, device=device).view(-1, heads) * self.own.columns
            self._index[heads] = (first + self.write_at[:, None]).view(-1)
        return self._index[heads]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.width, 0


def _filled_up(rows: int, most: int) -> int:
    """The next power of two, or three quarters of it, at most `most`."""
    power = 1 << (rows - 1).bit_length()
    return min(most, 3 * power // 4 if rows <= 3 * power // 4 else power)
