"""Where draft blocks begin in a training row.

An anchor `a` is a generated token whose successor is generated too and belongs to the same document: slot 0 of
its block holds the token itself, and slot 1 has something to predict.
"""

import numpy as np
import torch
from torch import Tensor

from trainer.data import Rows


def eligible(rows: Rows) -> Tensor:
    """[R, S] bool."""
    index = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    follows = torch.zeros_like(rows.generated)
    follows[:, :-1] = rows.generated[:, 1:]
    return rows.generated & follows & (index + 1 < rows.end)


def draw(seed: int, step: int, *, allowed: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Choose up to `slots` of each row's allowed positions, uniformly and without repetition.

    allowed [R, S] bool -> anchors [R, slots] int64, sorted along each row, and keep [R, slots] bool. Slots that
    found no position hold the row's last index and are not kept. A pure function of (seed, step, allowed).
    """
    rows, length = allowed.shape
    keys = torch.from_numpy(np.random.default_rng((seed, 1, step)).random((rows, length))).to(allowed.device)
    keys = keys.masked_fill(~allowed, 2.0)
    chosen = min(slots, length)
    best, index = keys.topk(chosen, dim=1, largest=False)
    anchors = torch.full((rows, slots), length - 1, dtype=torch.int64, device=allowed.device)
    anchors[:, :chosen] = torch.where(best < 2.0, index, length)
    anchors, _ = anchors.sort(dim=1)
    count = allowed.sum(dim=1, keepdim=True).clamp(max=slots)
    keep = torch.arange(slots, device=allowed.device) < count
    return anchors.clamp(max=length - 1), keep
