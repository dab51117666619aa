"""Keys and values of earlier positions, for many rows that advance at different speeds.

The usual cache appends, so rejected drafts have to be cropped away, and rows of one batch would need different
crops. Here entry p of a row belongs to absolute position p, and writing a position again replaces it. Cropping is
then nothing but a smaller `start`: what lies at or beyond it is hidden by the mask, and is overwritten before any
query may see it.
"""

import torch
from torch import Tensor


class PositionCache:
    """Has the two methods that Hugging Face models ask of a cache, so it can be given to them."""

    def __init__(self, *, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> two [R, Hkv, capacity, d]
        self.index = torch.empty(0)
        self.width = 0

    def at(self, positions: Tensor, *, width: int) -> None:
        """The next updates write to `positions` [R, Q]; reads return the positions below `width`."""
        self.index, self.width = positions[:, None, :, None], width

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key and value [R, Hkv, Q, d] -> those of all positions below the width, [R, Hkv, width, d]."""
        if layer_idx not in self.layers:
            shape = (self.rows, key.shape[1], self.capacity, key.shape[3])
            self.layers[layer_idx] = key.new_zeros(shape), value.new_zeros(shape)
        for buffer, new in zip(self.layers[layer_idx], (key, value), strict=True):
            buffer.scatter_(2, self.index.expand_as(new), new)
        return self.read(layer_idx)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width

    def keep(self, rows: Tensor) -> None:
        """Drop all but these rows [R'] (indices)."""
        self.rows = len(rows)
        self.layers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self.layers.items()}
