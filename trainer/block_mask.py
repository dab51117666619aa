"""Which keys a draft block may see, from one interval [lo, hi) of context a block.

Keys are laid out [context S | block 0 | … | block N-1], queries [block 0 | … | block N-1], B slots a block. A query
sees the context of its block's interval and all slots of its own block (bidirectional). For a block anchored at
`a` in a document that begins at `s`, the interval is [s, a): the anchor's own feature is not visible, because when
drafting begins the target has only just sampled that token and has not read it yet.
"""

import torch
from torch import Tensor


def visible_context(lo: Tensor, hi: Tensor, *, context: int) -> Tensor:
    """lo, hi [R, N] -> [R, N, S] bool: the context that each block sees."""
    key = torch.arange(context, device=lo.device)
    return (key >= lo[..., None]) & (key < hi[..., None])


def dense(lo: Tensor, hi: Tensor, keep: Tensor, *, context: int, block: int) -> Tensor:
    """lo, hi, keep [R, N] -> allow [R, N*B, S + N*B] bool. A block that is not kept sees nothing."""
    rows, blocks = lo.shape
    sees_context = visible_context(lo, hi, context=context) & keep[..., None]
    own = torch.eye(blocks, dtype=torch.bool, device=lo.device) & keep[..., None]
    allow = torch.cat([sees_context, own.repeat_interleave(block, dim=2)], dim=2)
    return allow.repeat_interleave(block, dim=1).reshape(rows, blocks * block, context + blocks * block)


def brute_force(lo: Tensor, hi: Tensor, keep: Tensor, *, context: int, block: int) -> Tensor:
    """The same, cell by cell and straight from the definition. For tests."""
    rows, blocks = lo.shape
    size = blocks * block
    allow = torch.zeros(rows, size, context + size, dtype=torch.bool)
    for r in range(rows):
        for q in range(size):
            b = q // block
            for k in range(context + size):
                if k < context:
                    visible = int(lo[r, b]) <= k < int(hi[r, b])
                else:
                    visible = (k - context) // block == b
                allow[r, q, k] = visible and bool(keep[r, b])
    return allow
