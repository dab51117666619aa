"""Which keys a query may see, from intervals [lo, hi) of keys: never from a predicate over all pairs.

Draft blocks. Keys are laid out [context S | block 0 | … | block N-1], queries [block 0 | … | block N-1], B slots a
block. A query at slot o of a block anchored at `a`, in a document that begins at `s`, sees two intervals: the context
[max(s, a+o-(window-1)), a) and its own block, all of it or, causal, its slots up to o. The anchor's own feature is not
visible, because when drafting begins the target has only just sampled that token and has not read it yet.

Documents, for the frozen target: token t sees the one interval [max(start, t-window+1), t].

For flex attention, intervals become lists of tiles, 128 queries by 128 keys: tiles of which some query sees some key,
and among these the full ones, of which every query sees every key. Only in tiles that are not full is a mask applied,
and it compares with the same intervals, so that the two cannot differ. Everything stays on the tensors' device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.errors import TrainerError

TILE = 128  # queries and keys of a tile
Interval = tuple[Tensor, Tensor]  # lo, hi [R, Q] int32: a query sees the keys lo … hi-1, none where hi <= lo


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Where the draft blocks of some rows stand. R rows, N blocks a row."""

    start: Tensor  # [R, N] int64, index in the row where the anchor's document begins
    anchor: Tensor  # [R, N] int64, index in the row of the token in slot 0
    keep: Tensor  # [R, N] bool; a block that is not kept sees nothing, itself included
    context: int  # S, tokens of a row
    size: int  # B, slots of a block

    @property
    def queries(self) -> int:
        return self.anchor.shape[1] * self.size

    @property
    def keys(self) -> int:
        return self.context + self.queries


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """How the attention of one drafter layer differs from seeing everything before the block and all of the block."""

    window: int = 0  # the last context positions that a query reaches, itself counted as one; 0: all
    causal: bool = False  # inside the block


def padded_slots(slots: int, block: int) -> int:
    """The least number of blocks, at least `slots`, that fill whole tiles. `flex_mask` wants such a number."""
    unit = TILE // gcd(TILE, block)
    return -(-slots // unit) * unit


def intervals(blocks: Blocks, kind: LayerKind) -> tuple[Interval, Interval]:
    """What each of the N*B queries of a row sees: its interval of the context, and that of its own block."""
    slot = torch.arange(blocks.size, device=blocks.anchor.device)
    anchor, keep = blocks.anchor[..., None], blocks.keep[..., None]
    lo = blocks.start[..., None].expand(-1, -1, blocks.size)
    if kind.window:
        lo = torch.maximum(lo, anchor + slot - (kind.window - 1))
    hi = torch.where(keep, anchor, lo)
    number = torch.arange(blocks.anchor.shape[1], device=slot.device)[:, None]
    own_lo = (blocks.context + number * blocks.size).expand_as(lo)
    own_hi = torch.where(keep, own_lo + (slot + 1 if kind.causal else blocks.size), own_lo)
    lo, hi, own_lo, own_hi = (bound.flatten(1).to(torch.int32) for bound in (lo, hi, own_lo, own_hi))
    return (lo, hi), (own_lo, own_hi)


def document_interval(start: Tensor, window: int = 0) -> Interval:
    """start [R, S], where each token's document begins -> what each token sees. `start` must not exceed the index."""
    token = torch.arange(start.shape[1], device=start.device).expand_as(start)
    lo = torch.maximum(start, token - (window - 1)) if window else start
    return lo.to(torch.int32), (token + 1).to(torch.int32)


def flex_mask(blocks: Blocks, kind: LayerKind) -> BlockMask:
    """The mask of `intervals` for flex attention, built without waiting for the device.

    S and N*B must be multiples of 128 (see `padded_slots`), else TrainerError. The largest intermediate has one
    number for every pair of tiles of a row.
    """
    if blocks.context % TILE or blocks.queries % TILE:
        raise TrainerError(
            f"flex attention works on tiles of {TILE}: rows of {blocks.context} tokens and {blocks.queries} draft "
            f"slots must both be multiples of it; set data.row_length so, or `attention: dense`"
        )
    # a tile lies in the context or among the blocks, so no tile is seen in full by means of both intervals only
    (lo, hi), (own_lo, own_hi) = intervals(blocks, kind)

    def allow(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= lo[row, query]) & (key < hi[row, query])
        return in_context | ((key >= own_lo[row, query]) & (key < own_hi[row, query]))

    present, full = tiles((lo, hi), blocks.keys)
    own_present, own_full = tiles((own_lo, own_hi), blocks.keys)
    return _block_mask(present | own_present, full | own_full, allow)


def document_mask(start: Tensor, window: int = 0) -> BlockMask:
    """The mask of `document_interval` for flex attention: start [R, S], S a multiple of 128, else TrainerError."""
    if start.shape[1] % TILE:
        raise TrainerError(
            f"flex attention works on tiles of {TILE}: rows of {start.shape[1]} tokens are no multiple of it; "
            f"set data.row_length so, or `attention: dense`"
        )
    lo, hi = document_interval(start, window)

    def allow(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= lo[row, query]) & (key < hi[row, query])

    return _block_mask(*tiles((lo, hi), start.shape[1]), allow)


def tiles(interval: Interval, keys: int) -> tuple[Tensor, Tensor]:
    """Present and full tiles [R, Q/128, keys/128] bool of an interval a query.

    Present is counted, not tested pair by pair. An interval meets the tile [begin, end) if lo < end and hi > begin.
    The few that have hi <= begin have lo < end as well, so the number that meet it is #(lo < end) - #(hi <= begin),
    and each count is one look-up in the sorted bounds of the tile's 128 queries.
    """
    lo, hi = (bound.unflatten(1, (-1, TILE)) for bound in interval)
    empty = lo >= hi
    lo, hi = lo.masked_fill(empty, keys), hi.masked_fill(empty, keys)  # past all tiles: in neither count
    begin = torch.arange(0, keys, TILE, device=lo.device, dtype=lo.dtype).expand(*lo.shape[:2], -1).contiguous()
    end = begin + TILE
    begun = torch.searchsorted(lo.sort(dim=-1).values, end, out_int32=True)
    over = torch.searchsorted(hi.sort(dim=-1).values, begin, right=True, out_int32=True)
    return begun > over, (lo.amax(-1, keepdim=True) <= begin) & (hi.amin(-1, keepdim=True) >= end)


def _block_mask(present: Tensor, full: Tensor, allow: Callable[..., Tensor]) -> BlockMask:
    def listed(flags: Tensor) -> tuple[Tensor, Tensor]:
        """How many tiles of each row of tiles, and their numbers first: [R, 1, Q/128] and [R, 1, Q/128, keys/128]."""
        order = flags.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        return flags.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]

    lengths = (present.shape[1] * TILE, present.shape[2] * TILE)
    partial = present & ~full
    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=TILE, mask_mod=allow, seq_lengths=lengths
    )


def inside(interval: Interval, keys: int) -> Tensor:
    """[R, Q, keys] bool: the keys of each query, spelled out."""
    key = torch.arange(keys, device=interval[0].device)
    return (key >= interval[0][..., None]) & (key < interval[1][..., None])


def dense(blocks: Blocks, kind: LayerKind) -> Tensor:
    """allow [R, N*B, S + N*B] bool, of any S and N*B. For small shapes."""
    context, own = intervals(blocks, kind)
    return inside(context, blocks.keys) | inside(own, blocks.keys)


def document_dense(start: Tensor, window: int = 0) -> Tensor:
    """allow [R, S, S] bool, of any S. For small shapes."""
    return inside(document_interval(start, window), start.shape[1])


def brute_force(blocks: Blocks, kind: LayerKind) -> Tensor:
    """`dense`, cell by cell and straight from the definition. For tests."""
    rows, size, context = len(blocks.anchor), blocks.size, blocks.context
    allow = torch.zeros(rows, blocks.queries, blocks.keys, dtype=torch.bool)
    for r in range(rows):
        for b in range(blocks.anchor.shape[1]):
            if not blocks.keep[r, b]:
                continue
            start, anchor = int(blocks.start[r, b]), int(blocks.anchor[r, b])
            for slot in range(size):
                for key in range(context):
                    near = kind.window == 0 or (anchor + slot) - key < kind.window
                    allow[r, b * size + slot, key] = start <= key < anchor and near
                for other in range(size):
                    allow[r, b * size + slot, context + b * size + other] = other <= slot or not kind.causal
    return allow
