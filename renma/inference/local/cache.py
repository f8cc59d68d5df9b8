"""Keys and values of every sequence, one static buffer a layer, in the form transformers' models ask for.

A buffer has shape [rows, kv_heads, capacity, head_dim]. Full buffers are kept for sliding-window layers too: the
window is in the mask, so that a cached prefix serves whatever comes after it. Rows and capacity grow when more or
longer sequences come; a model with a context of 128k tokens does not pay for it in a run of short episodes.

The experts that a mixture-of-experts model chose lie beside them, where they are recorded: they go wherever the keys
and values of a position go, so that a reused prefix brings its routes along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_CAPACITY = 256
FIRST_ROWS = 16


@dataclass(slots=True)
class Placement:
    """Where the next forward reads and writes. The engine sets it before each forward; all layers share it.

    rows: the rows of the batch, as a (first, past_last) range where they are neighbours (no copy is made), else their
    indices [B]. rows_to, positions_to [N]: where the N new positions go. batch_from, query_from [N]: which of the
    forward's [B, Q] positions they are; None when Q is 1 and every row writes. length: positions that attention reads.
    """

    rows: tuple[int, int] | Tensor
    rows_to: Tensor
    positions_to: Tensor
    length: int
    batch_from: Tensor | None = None
    query_from: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not whatever memory holds: a masked position has weight 0, and 0 times NaN is NaN.
        rows, capacity = self.cache.rows, self.cache.capacity
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[-1])
        self.is_initialized = True

    def append(self, new_keys: Tensor, new_values: Tensor, positions: Tensor) -> None:
        """Write one new position a row, [B, kv_heads, ·], at `positions` [B] of rows 0..B-1."""
        if not self.is_initialized:
            self.lazy_initialization(new_keys, new_values)
        rows = self.cache.range[: len(positions)]
        self.keys[rows, :, positions] = new_keys
        self.values[rows, :, positions] = new_values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new positions, [B, kv_heads, Q, head_dim], and give all of the batch, [B, kv_heads, length, ·]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.cache.placement
        if place.batch_from is None:
            self.append(key_states[:, :, 0], value_states[:, :, 0], place.positions_to)
        else:
            self.keys[place.rows_to, :, place.positions_to] = key_states[place.batch_from, :, place.query_from]
            self.values[place.rows_to, :, place.positions_to] = value_states[place.batch_from, :, place.query_from]
        if isinstance(place.rows, tuple):
            first, past_last = place.rows
            return self.keys[first:past_last, :, : place.length], self.values[first:past_last, :, : place.length]
        keys, values = self.keys[:, :, : place.length], self.values[:, :, : place.length]
        return keys.index_select(0, place.rows), values.index_select(0, place.rows)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.placement.length, 0

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlotCache(Cache):
    """A transformers `Cache` whose batch rows are the engine's sequences; it also moves and copies them.

    most: how many rows there may be; `rows` of them are allocated. range: 0..most-1, on the model's device.
    routes [rows, expert layers, capacity, k] int16: the experts of each position; None while none are recorded.
    """

    placement: Placement

    def __init__(self, layers: int, most: int, context: int, device: torch.device | None = None) -> None:
        self.most = most
        self.context = context
        self.range = torch.arange(most, device=device)
        self.rows = min(most, FIRST_ROWS)
        self.capacity = min(context, FIRST_CAPACITY)
        self.routes: Tensor | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    @property
    def stored(self) -> list[SlotLayer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for rows 0..rows-1 and `length` positions in each."""
        if rows <= self.rows and length <= self.capacity:
            return
        if rows > self.rows:
            self.rows = min(self.most, max(rows, 2 * self.rows))
        if length > self.capacity:
            # By a quarter, not to the double: these buffers are among the largest things in memory.
            self.capacity = min(self.context, -(-max(length, self.capacity * 5 // 4) // 64) * 64)

        def grown(buffer: Tensor) -> Tensor:
            larger = buffer.new_zeros(self.rows, buffer.shape[1], self.capacity, buffer.shape[3])
            larger[: buffer.shape[0], :, : buffer.shape[2]] = buffer
            return larger

        for layer in self._initialized():
            layer.keys, layer.values = grown(layer.keys), grown(layer.values)
        if self.routes is not None:
            self.routes = grown(self.routes)

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange two rows, whose first `length` positions hold something."""
        self.reserve(max(one, other) + 1, length)
        for buffer in self._buffers():
            kept = buffer[one, :, :length].clone()
            buffer[one, :, :length] = buffer[other, :, :length]
            buffer[other, :, :length] = kept

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions [start, end) of row `source` to row `target`."""
        if start >= end:
            return
        self.reserve(max(source, target) + 1, end)
        for buffer in self._buffers():
            buffer[target, :, start:end] = buffer[source, :, start:end]

    def record(self, chosen: Tensor) -> None:
        """Keep the experts chosen, [positions of the last forward, expert layers, k], where it wrote its keys."""
        place = self.placement
        if self.routes is None:
            self.routes = torch.zeros(
                (self.rows, chosen.shape[1], self.capacity, chosen.shape[2]), dtype=torch.int16, device=chosen.device
            )
        new = chosen.to(torch.int16)
        if place.batch_from is not None:
            rows = len(place.rows) if isinstance(place.rows, Tensor) else place.rows[1] - place.rows[0]
            new = new.unflatten(0, (rows, -1))[place.batch_from, place.query_from]
        self.routes[place.rows_to, :, place.positions_to] = new

    def recorded(self, row: int, length: int) -> Tensor | None:
        """[length, expert layers, k] the experts of a row's first positions; None where none are recorded."""
        return None if self.routes is None else self.routes[row, :, :length].transpose(0, 1)

    def release(self) -> None:
        """Give the memory back; the next forward allocates anew."""
        self.rows, self.capacity = min(self.most, FIRST_ROWS), min(self.context, FIRST_CAPACITY)
        self.layers = [SlotLayer(self) for _ in self.layers]
        self.routes = None

    def _buffers(self) -> list[Tensor]:
        """Everything that is kept for each position: [rows, ·, capacity, ·] each."""
        buffers = [buffer for layer in self._initialized() for buffer in (layer.keys, layer.values)]
        return buffers if self.routes is None else [*buffers, self.routes]

    def _initialized(self) -> list[SlotLayer]:
        return [layer for layer in self.stored if layer.is_initialized]


def index(values: Any, device: torch.device) -> Tensor:
    """Numbers (a list or a numpy array) as an index tensor on `device`."""
    return torch.as_tensor(values, dtype=torch.int64).to(device)
