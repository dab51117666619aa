"""Where draft blocks begin in a training row.

An anchor `a` is a generated token whose successor is generated too and belongs to the same document: slot 0 of
its block holds the token itself, and the block has something to predict.
"""

import numpy as np
import torch
from torch import Tensor

from trainer.data.rows import Rows


def eligible(rows: Rows) -> Tensor:
    """[R, S] bool."""
    index = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    follows = torch.zeros_like(rows.generated)
    follows[:, :-1] = rows.generated[:, 1:]
    return rows.generated & follows & (index + 1 < rows.end)


def draw(
    seed: int, step: int, *, allowed: Tensor, slots: int, width: int | None = None, first: int = 0, number: int = 0
) -> tuple[Tensor, Tensor]:
    """Choose up to `slots` of each row's allowed positions, uniformly and without repetition.

    allowed [R, S] bool on the CPU -> anchors [R, width] int64, sorted along each row, and keep [R, width] bool.
    `width` (default: slots) may exceed `slots`, as the block mask wants whole tiles. Slots that found no position hold
    the row's last index and are not kept.

    A pure function: every row of the step has random keys of its own, and the smallest win. The rows given are those
    from the step's row `first` on, so a part of a step gets the anchors that it has in the whole. `number` tells
    further draws for the same rows apart.
    """
    rows, length = allowed.shape
    width = slots if width is None else width
    if width < slots:
        raise ValueError(f"width {width} is less than the {slots} slots wanted")
    generator = np.random.default_rng((seed, 1, step, number) if number else (seed, 1, step))
    generator.bit_generator.advance(first * length)  # a key takes one number of the stream
    keys = generator.random((rows, length))
    anchors = np.full((rows, width), length - 1, np.int64)
    keep = np.zeros((rows, width), bool)
    for row, places in enumerate(allowed.numpy()):
        index = np.flatnonzero(places)
        if len(index) > slots:
            index = np.sort(index[np.argpartition(keys[row, index], slots - 1)[:slots]])
        anchors[row, : len(index)] = index
        keep[row, : len(index)] = True
    return torch.from_numpy(anchors), torch.from_numpy(keep)
