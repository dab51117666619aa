"""Every way to compute attention gives what the plain twin gives, and what builds scores refuses to build many."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from trainer import attention, block_mask, dense_guard
from trainer.block_mask import TILE, Blocks, LayerKind
from trainer.errors import TrainerError

KINDS = (LayerKind(), LayerKind(causal=True), LayerKind(window=6), LayerKind(window=3, causal=True))


def make_blocks(*, slots: int, size: int, context: int, document: int, seed: int, rows: int = 2) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randint(0, context, (rows, slots), generator=generator).sort(dim=1).values
    keep = torch.rand(rows, slots, generator=generator) < 0.8
    keep[0, 0] = False
    return Blocks(start=anchor // document * document, anchor=anchor, keep=keep, context=context, size=size)


def inputs(blocks: Blocks, *, heads: int, kv_heads: int, width: int, seed: int, dtype=torch.float32):
    """query, (key, value) of the context, (key, value) of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (blocks.context, blocks.context, blocks.queries, blocks.queries)
    shapes = [(heads, blocks.queries), *((kv_heads, length) for length in lengths)]
    rows = len(blocks.anchor)
    query, key, value, own_key, own_value = (
        torch.randn(rows, *shape, width, generator=generator, dtype=dtype) for shape in shapes
    )
    return query, (key, value), (own_key, own_value)


def twin(blocks: Blocks, kind: LayerKind, query, context, block):
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
    return attention.attend(query, key, value, block_mask.dense(blocks, kind))


def test_attention_equals_softmax_written_out():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 3), (2, 5), (2, 5)))
    allow = torch.tensor([[[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]], dtype=torch.bool)
    result = attention.attend(query, key, value, allow)
    for head in range(4):
        scores = query[0, head] @ key[0, head // 2].T / 8**0.5
        weights = scores.masked_fill(~allow[0], float("-inf")).softmax(-1).nan_to_num()
        torch.testing.assert_close(result[0, head], weights @ value[0, head // 2])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 30), st.sampled_from(KINDS), st.sampled_from([1, 2, 4]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_the_dense_plan_and_its_gradients_equal_the_plain_twins(slots, size, context, kind, kv_heads, seed):
    blocks = make_blocks(slots=slots, size=size, context=context, document=9, seed=seed)
    query, seen, own = inputs(blocks, heads=4, kv_heads=kv_heads, width=3, seed=seed, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (query, *seen, *own)]
    fast = attention.dense_plan(blocks)(kind, query, seen, own)
    plain = twin(blocks, kind, query, seen, own)
    torch.testing.assert_close(fast, plain, atol=1e-12, rtol=1e-12)
    direction = torch.randn(fast.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(way, leaves, direction) for way in (fast, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_a_block_that_is_not_kept_gets_zeros_and_gives_no_gradient():
    blocks = make_blocks(slots=3, size=2, context=9, document=5, seed=1)
    query, seen, own = inputs(blocks, heads=2, kv_heads=2, width=4, seed=1)
    query.requires_grad_()
    for way in (attention.dense_plan(blocks)(KINDS[0], query, seen, own), twin(blocks, KINDS[0], query, seen, own)):
        (gradient,) = torch.autograd.grad(way.square().sum(), query)
        dropped = ~blocks.keep.repeat_interleave(2, dim=1)[:, None, :, None].expand_as(query)
        assert dropped.any() and not way[dropped].any() and not gradient[dropped].any()
        assert way[~dropped].any() and gradient[~dropped].any()


def test_lower_precision_is_computed_in_float32_and_returned_as_it_came():
    blocks = make_blocks(slots=3, size=2, context=9, document=5, seed=2)
    query, seen, own = inputs(blocks, heads=2, kv_heads=1, width=4, seed=2, dtype=torch.bfloat16)
    wide = inputs(blocks, heads=2, kv_heads=1, width=4, seed=2, dtype=torch.bfloat16)
    wide = [wide[0].float(), *((key.float(), value.float()) for key, value in wide[1:])]
    result = attention.dense_plan(blocks)(KINDS[1], query, seen, own)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, twin(blocks, KINDS[1], *wide).bfloat16())
    torch.testing.assert_close(twin(blocks, KINDS[1], query, seen, own), result)


def test_scores_beyond_the_bound_are_refused_with_their_bytes():
    blocks = make_blocks(slots=3, size=2, context=9, document=5, seed=3)
    query, seen, own = inputs(blocks, heads=2, kv_heads=1, width=4, seed=3)
    size = 2 * 2 * 6 * (9 + 2) * 4  # rows, heads, queries, keys of a query, float32
    attention.dense_plan(blocks, bound=size)(KINDS[0], query, seen, own)
    with pytest.raises(TrainerError, match=f"scores of {size} bytes .* set `attention: flex`"):
        attention.dense_plan(blocks, bound=size - 1)(KINDS[0], query, seen, own)
    allow, size = torch.ones(2, 6, 9, dtype=torch.bool), 2 * 2 * 6 * 9 * 4
    attention.dense_document_attention(query, *seen, allow, bound=size)
    with pytest.raises(TrainerError, match=f"scores of {size} bytes"):
        attention.dense_document_attention(query, *seen, allow, bound=size - 1)


def test_flex_attention_equals_the_twin_for_every_kind_with_one_compilation():
    """Kinds, documents and new masks of one shape share a kernel; 10 slots fill no tile, and heads of 12 no power."""
    torch._dynamo.reset()
    counters.clear()
    blocks = make_blocks(slots=64, size=10, context=2 * TILE, document=100, seed=4)
    query, seen, own = inputs(blocks, heads=4, kv_heads=2, width=12, seed=4)
    kinds = (*KINDS[:2], LayerKind(window=30, causal=True))
    plan, dense = attention.flex_plan(blocks, kinds), attention.dense_plan(blocks)
    for kind in kinds:
        result = plan(kind, query, seen, own)
        torch.testing.assert_close(result, twin(blocks, kind, query, seen, own), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result, dense(kind, query, seen, own), atol=1e-5, rtol=1e-5)
    assert not result.unflatten(2, (64, 10))[0, :, 0].any()
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        later = make_blocks(slots=64, size=10, context=2 * TILE, document=60, seed=5)
        result = attention.flex_plan(later, kinds[:1])(kinds[0], query, seen, own)
    torch.testing.assert_close(result, twin(later, kinds[0], query, seen, own), atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == compiled


def test_flex_attention_of_documents_equals_the_twin():
    start = torch.stack([torch.arange(TILE) // size * size for size in (50, 128)])
    generator = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(2, heads, TILE, 16, generator=generator) for heads in (4, 2, 2))
    for window in (0, 20):
        flex = attention.document_attention(query, key, value, block_mask.document_mask(start, window))
        allow = block_mask.document_dense(start, window)
        plain = attention.dense_document_attention(query, key, value, allow)
        torch.testing.assert_close(flex, plain, atol=1e-5, rtol=1e-5)


def test_what_flex_attention_cannot_do_is_refused_with_what_to_do():
    blocks = make_blocks(slots=32, size=4, context=TILE, document=50, seed=7)
    plan = attention.flex_plan(blocks, KINDS[:1])
    query, seen, own = inputs(blocks, heads=2, kv_heads=1, width=4, seed=7)
    with pytest.raises(TrainerError, match="backward pass without a GPU; set `attention: dense`"):
        plan(KINDS[0], query.requires_grad_(), seen, own)
    with pytest.raises(TrainerError, match="float64"):
        plan(KINDS[0], *inputs(blocks, heads=2, kv_heads=1, width=4, seed=7, dtype=torch.float64))


def test_importing_the_module_installs_the_guard():
    dense_guard.check()
