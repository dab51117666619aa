"""Masks of draft blocks and of documents: against the definition, cell by cell and tile by tile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import block_mask
from trainer.block_mask import TILE, Blocks, LayerKind
from trainer.errors import TrainerError


def starts(length: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """[length]: where the document of each token begins, documents of 1 … longest tokens one after the other."""
    start, at = torch.zeros(length, dtype=torch.int64), 0
    while at < length:
        size = int(torch.randint(1, longest + 1, (), generator=generator))
        start[at : at + size] = at
        at += size
    return start


def make_blocks(*, rows: int, slots: int, size: int, context: int, longest: int, kept: float, seed: int) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    start = torch.stack([starts(context, longest, generator) for _ in range(rows)])
    anchor = torch.randint(0, context, (rows, slots), generator=generator).sort(dim=1).values
    keep = torch.rand(rows, slots, generator=generator) < kept
    return Blocks(start=start.gather(1, anchor), anchor=anchor, keep=keep, context=context, size=size)


KINDS = st.builds(LayerKind, window=st.sampled_from([0, 1, 5, 40, 150, 1000]), causal=st.booleans())


@st.composite
def any_blocks(draw) -> Blocks:
    return make_blocks(
        rows=draw(st.integers(1, 2)),
        slots=draw(st.integers(1, 5)),
        size=draw(st.integers(1, 7)),
        context=draw(st.integers(1, 40)),
        longest=draw(st.sampled_from([3, 20, 100])),
        kept=draw(st.sampled_from([0.0, 0.7, 1.0])),
        seed=draw(st.integers(0, 10**6)),
    )


@st.composite
def tiled_blocks(draw) -> Blocks:
    """Blocks that fill whole tiles: sizes that divide a tile, sizes that do not, and sizes beyond a tile."""
    size = draw(st.sampled_from([1, 4, 7, 8, 10, 16, 32, 48, 64, 128, 130, 192, 256, 300]))
    unit = block_mask.padded_slots(1, size)
    most = max(1, 640 // (unit * size))
    return make_blocks(
        rows=draw(st.integers(1, 3)),
        slots=unit * draw(st.integers(1, most)),
        size=size,
        context=TILE * draw(st.integers(1, 5)),
        longest=draw(st.sampled_from([30, 200, 2000])),
        kept=draw(st.sampled_from([0.0, 0.6, 0.98, 1.0])),
        seed=draw(st.integers(0, 10**6)),
    )


def listed(number: torch.Tensor, index: torch.Tensor, columns: int) -> torch.Tensor:
    """The list of a BlockMask as flags [R, rows, columns]; its entries must be distinct."""
    assert number.dtype == index.dtype == torch.int32
    assert number.shape[1] == index.shape[1] == 1  # all heads share a list
    flags = torch.zeros(number.shape[0], number.shape[2], columns, dtype=torch.bool)
    for row in range(number.shape[0]):
        for tile in range(number.shape[2]):
            named = index[row, 0, tile, : number[row, 0, tile]].long()
            assert len(named.unique()) == len(named)
            flags[row, tile, named] = True
    return flags


def check_lists(mask, allow: torch.Tensor) -> None:
    """allow [R, Q, K]: the four lists of `mask` must be the classification of its tiles."""
    cells = allow.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))  # [R, Q/128, 128, K/128, 128]
    full, partial = cells.all(4).all(2), cells.any(4).any(2) & ~cells.all(4).all(2)
    queries, keys = partial.shape[1:]
    assert mask.seq_lengths == allow.shape[1:]
    assert mask.BLOCK_SIZE == (TILE, TILE)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices, keys), partial)
    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices, keys), full)
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, queries), partial.mT)
    assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, queries), full.mT)


def cells_of(mask, rows: int) -> torch.Tensor:
    """What mask_mod says of every cell [R, Q, K]."""
    row = torch.arange(rows)[:, None, None]
    query = torch.arange(mask.seq_lengths[0])[:, None]
    return mask.mask_mod(row, torch.tensor(0), query, torch.arange(mask.seq_lengths[1]))


@settings(max_examples=80, deadline=None)
@given(any_blocks(), KINDS)
def test_the_dense_mask_equals_its_definition(blocks, kind):
    assert torch.equal(block_mask.dense(blocks, kind), block_mask.brute_force(blocks, kind))


@settings(max_examples=40, deadline=None)
@given(tiled_blocks(), KINDS)
def test_the_flex_mask_lists_exactly_the_tiles_that_are_seen_and_those_seen_in_full(blocks, kind):
    mask, allow = block_mask.flex_mask(blocks, kind), block_mask.dense(blocks, kind)
    check_lists(mask, allow)
    assert torch.equal(cells_of(mask, len(blocks.anchor)), allow)


@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=50, causal=True)])
def test_the_flex_mask_equals_the_definition(kind):
    """As above, but without the dense mask, which comes from the same intervals."""
    blocks = make_blocks(rows=2, slots=16, size=8, context=256, longest=100, kept=0.9, seed=5)
    mask, allow = block_mask.flex_mask(blocks, kind), block_mask.brute_force(blocks, kind)
    check_lists(mask, allow)
    assert torch.equal(cells_of(mask, 2), allow)


def blocks_at(*places: tuple[int, int], size: int, context: int) -> Blocks:
    start, anchor = torch.tensor(places).T
    keep = torch.ones(1, len(places), dtype=torch.bool)
    return Blocks(start=start[None], anchor=anchor[None], keep=keep, context=context, size=size)


def test_the_anchors_own_feature_is_not_visible_nor_what_lies_before_its_document():
    allow = block_mask.dense(blocks_at((2, 5), size=2, context=8), LayerKind())
    assert allow[0, 0].nonzero().flatten().tolist() == [2, 3, 4, 8, 9]


def test_a_window_moves_with_the_slot_and_a_causal_block_hides_what_is_to_come():
    allow = block_mask.dense(blocks_at((0, 5), size=3, context=8), LayerKind(window=3, causal=True))
    assert [row.nonzero().flatten().tolist() for row in allow[0]] == [[3, 4, 8], [4, 8, 9], [8, 9, 10]]


@pytest.mark.parametrize(("start", "anchor", "full", "partial"), [(0, 256, 2, 0), (0, 255, 1, 1), (1, 257, 1, 2)])
def test_an_interval_that_ends_on_a_tiles_edge_does_not_touch_the_next_tile(start, anchor, full, partial):
    mask = block_mask.flex_mask(blocks_at((start, anchor), size=128, context=384), LayerKind())
    assert mask.full_kv_num_blocks.item() == full + 1  # a block of 128 slots sees all of its own tile
    assert mask.kv_num_blocks.item() == partial


@pytest.mark.parametrize(
    ("slots", "block", "padded"), [(1, 32, 4), (4, 32, 4), (5, 7, 128), (100, 10, 128), (3, 256, 3)]
)
def test_slots_are_padded_to_whole_tiles(slots, block, padded):
    assert block_mask.padded_slots(slots, block) == padded
    assert padded * block % TILE == 0


@pytest.mark.parametrize(("slots", "context"), [(15, 128), (16, 100)])
def test_shapes_that_are_no_whole_tiles_are_refused(slots, context):
    blocks = make_blocks(rows=1, slots=slots, size=8, context=context, longest=10, kept=1.0, seed=0)
    with pytest.raises(TrainerError, match="multiples"):
        block_mask.flex_mask(blocks, LayerKind())


class Largest(TorchDispatchMode):
    """The most bytes that one tensor takes, and the operations that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.bytes, self.waits = 0, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if any(name in str(function) for name in ("local_scalar_dense", "nonzero", "masked_select", "_to_cpu")):
            self.waits.append(str(function))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def test_at_the_production_shape_no_intermediate_is_large_and_no_value_is_asked_for():
    blocks = make_blocks(rows=1, slots=1024, size=32, context=40064, longest=4000, kept=0.95, seed=1)
    with Largest() as seen:
        mask = block_mask.flex_mask(blocks, LayerKind(window=2048, causal=True))
        documents = block_mask.document_mask(torch.zeros(1, 40064, dtype=torch.int64), 2048)
    assert mask.shape == (1, 1, 32768, 72832) and documents.shape == (1, 1, 40064, 40064)
    assert seen.bytes < 4 << 20
    assert seen.waits == []


def documents(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([starts(length, longest, generator) for longest in (30, 300)])


def documents_brute_force(start: torch.Tensor, window: int) -> torch.Tensor:
    rows, length = start.shape
    allow = torch.zeros(rows, length, length, dtype=torch.bool)
    for r in range(rows):
        for t in range(length):
            for key in range(t + 1):
                same = start[r, key] == start[r, t]
                allow[r, t, key] = same and (window == 0 or t - key < window)
    return allow


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0, 1, 7, 25]))
def test_a_token_sees_its_own_document_up_to_itself(seed, window):
    start = documents(30, seed)
    assert torch.equal(block_mask.document_dense(start, window), documents_brute_force(start, window))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0, 1, 100, 128, 300]))
def test_the_document_mask_lists_exactly_the_tiles_that_are_seen(seed, tiles, window):
    start = documents(tiles * TILE, seed)
    mask, allow = block_mask.document_mask(start, window), block_mask.document_dense(start, window)
    check_lists(mask, allow)
    assert torch.equal(cells_of(mask, len(start)), allow)


def test_padding_sees_at_least_itself():
    start = torch.tensor([[0, 0, 2, 2, 2]])  # packing lets the padding begin where the last document ended
    allow = block_mask.document_dense(start)
    assert allow.diagonal(dim1=1, dim2=2).all()
    assert not allow[0, 2:, :2].any()


def test_documents_that_are_no_whole_tiles_are_refused():
    with pytest.raises(TrainerError, match="multiple of it"):
        block_mask.document_mask(torch.zeros(1, 100, dtype=torch.int64))
