"""Training rows: documents packed into rows of one fixed length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Document:
    tokens: np.ndarray  # [n] int64
    generated: np.ndarray  # [n] bool, True where the token bears loss: what the target wrote
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Packed rows; padding is a document of its own that bears no loss."""

    tokens: Tensor  # [R, S] int64
    start: Tensor  # [R, S] int64, index in the row where the token's document begins
    end: Tensor  # [R, S] int64, index just past it
    generated: Tensor  # [R, S] bool, True where the token bears loss
    used: int  # tokens that are not padding
    cut: int = 0  # documents that were longer than a row and lost their ends

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def position(self) -> Tensor:
        """[R, S] position inside the document, as RoPE sees it."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) - self.start

    def take(self, index: Tensor, device: torch.device | str = "cpu") -> "Rows":
        tokens, start, end, generated = (
            tensor[index] for tensor in (self.tokens, self.start, self.end, self.generated)
        )
        used = int((end > start).sum())
        tokens, start, end, generated = (tensor.to(device) for tensor in (tokens, start, end, generated))
        return Rows(tokens=tokens, start=start, end=end, generated=generated, used=used)


def pack(documents: Sequence[Document], length: int, padding: int) -> Rows:
    """Fill rows first-fit in the documents' order. A document longer than a row keeps its first `length` tokens."""
    sizes = [min(len(document.tokens), length) for document in documents]
    places = first_fit(sizes, length)
    shape = (max((row for row, _ in places), default=-1) + 1, length)
    packed = np.full(shape, padding, np.int64)
    start, end, generated = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
    filled = np.zeros(len(packed), np.int64)
    for document, size, (row, at) in zip(documents, sizes, places, strict=True):
        stop = at + size
        packed[row, at:stop] = document.tokens[:size]
        start[row, at:stop], end[row, at:stop] = at, stop
        generated[row, at:stop] = document.generated[:size]
        filled[row] = stop
    for row, at in enumerate(filled):
        start[row, at:] = end[row, at:] = at  # padding: an empty interval, so nothing counts it as a document
    arrays = (torch.from_numpy(array) for array in (packed, start, end, generated))
    return Rows(
        **dict(zip(("tokens", "start", "end", "generated"), arrays, strict=True)),
        used=sum(sizes),
        cut=sum(len(document.tokens) > length for document in documents),
    )


def first_fit(sizes: Sequence[int], length: int) -> list[tuple[int, int]]:
    """(row, index in it) of each size: the first row with room, or a new one.

    A tree over the rows holds the largest room below each node, so that a million documents take seconds.
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [length] * (2 * leaves)
    places = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < size  # the right half, if the left one has no room
        places.append((node - leaves, length - room[node]))
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return places
