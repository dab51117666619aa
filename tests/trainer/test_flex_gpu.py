"""Flex attention on a GPU: forward and backward against the plain twin, without host syncs and with one compilation."""

import time

import pytest
import torch
from torch._dynamo.utils import counters

from trainer import attention, block_mask, dense_guard
from trainer.block_mask import TILE, Blocks, LayerKind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = (LayerKind(), LayerKind(causal=True), LayerKind(window=70), LayerKind(window=300, causal=True))
NAMES = ("result", "query", "key", "value", "own key", "own value")  # the last five: gradients
# largest deviation from the twin in float64, as a share of its largest value
BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def one_at_a_time():
    torch._dynamo.reset()
    counters.clear()


def make_blocks(*, slots: int, size: int, context: int, document: int, seed: int, rows: int = 2) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randint(0, context, (rows, slots), generator=generator).sort(dim=1).values
    keep = torch.rand(rows, slots, generator=generator) < 0.85
    keep[0, : TILE // size + 1] = False  # a whole tile of queries that see nothing
    start = anchor // document * document
    return Blocks(start=start.cuda(), anchor=anchor.cuda(), keep=keep.cuda(), context=context, size=size)


def inputs(blocks: Blocks, dtype: torch.dtype, *, heads: int = 4, kv_heads: int = 2, width: int = 64, seed: int = 0):
    """Leaves that want gradients: query, key and value of the context, key and value of the blocks."""
    generator = torch.Generator("cuda").manual_seed(seed)
    lengths = (blocks.context, blocks.context, blocks.queries, blocks.queries)
    shapes = [(heads, blocks.queries), *((kv_heads, length) for length in lengths)]
    rows = len(blocks.anchor)
    return [
        torch.randn(rows, *shape, width, generator=generator, device="cuda", dtype=dtype, requires_grad=True)
        for shape in shapes
    ]


def run(plan, kind, leaves):
    """The result and the gradients of all leaves, for a gradient of the result that is fixed by its shape."""
    query, key, value, own_key, own_value = leaves
    result = plan(kind, query, (key, value), (own_key, own_value))
    generator = torch.Generator("cuda").manual_seed(1)
    direction = torch.randn(result.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return result, *torch.autograd.grad(result, leaves, direction.to(result.dtype))


def twin_plan(blocks: Blocks):
    def attend(kind, query, context, block):
        key, value = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
        return attention.attend(query, key, value, block_mask.dense(blocks, kind))

    return attend


def deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    theirs = theirs.detach()
    return float((ours.detach().double() - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "size"), [(16, 32), (64, 10), (4, 128), (8, 192)])
def test_flex_attention_and_its_gradients_equal_the_twins(slots, size, dtype):
    blocks = make_blocks(slots=slots, size=size, context=5 * TILE, document=200, seed=slots)
    leaves = inputs(blocks, dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    nothing = ~blocks.keep.repeat_interleave(size, dim=1)[:, None, :, None].expand_as(leaves[0])
    assert nothing.any()
    plan, twin = attention.flex_plan(blocks, KINDS), twin_plan(blocks)
    for kind in KINDS:
        flex = run(plan, kind, leaves)
        for name, ours, theirs in zip(NAMES, flex, run(twin, kind, wide), strict=True):
            assert ours.isfinite().all(), (kind, name)
            assert deviation(ours, theirs) < BOUND[dtype], (kind, name)
        assert not flex[0][nothing].any() and not flex[1][nothing].any()


@pytest.mark.parametrize("width", [16, 96, 128])
def test_head_sizes(width):
    blocks = make_blocks(slots=16, size=16, context=2 * TILE, document=100, seed=3)
    leaves = inputs(blocks, torch.bfloat16, heads=6, kv_heads=2, width=width)
    flex = run(attention.flex_plan(blocks, KINDS[:1]), KINDS[0], leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for ours, theirs in zip(flex, run(twin_plan(blocks), KINDS[0], wide), strict=True):
        assert deviation(ours, theirs) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("window", [0, 90])
def test_documents_equal_the_twin(window):
    start = torch.stack([torch.arange(4 * TILE) // size * size for size in (100, 512)]).cuda()
    query, key, value = (torch.randn(2, heads, 4 * TILE, 64, device="cuda") for heads in (8, 2, 2))
    with torch.no_grad():
        flex = attention.document_attention(query, key, value, block_mask.document_mask(start, window))
    allow = block_mask.document_dense(start, window)
    plain = attention.dense_document_attention(query.double(), key.double(), value.double(), allow)
    assert deviation(flex, plain) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_in_which_no_block_is_kept_gives_zeros_and_zero_gradients(dtype):
    blocks = make_blocks(slots=16, size=16, context=2 * TILE, document=100, seed=4)
    blocks.keep.fill_(False)
    for tensor in run(attention.flex_plan(blocks, KINDS[:1]), KINDS[0], inputs(blocks, dtype)):
        assert not tensor.any()  # NaN would count as any


def test_masks_are_built_without_waiting_for_the_device_and_in_little_memory():
    """At the production shape: 1,024 blocks of 32 slots, 40,064 tokens."""
    blocks = make_blocks(slots=1024, size=32, context=40064, document=2000, seed=5, rows=1)
    start = (torch.arange(40064, device="cuda") // 2000 * 2000)[None]
    kind = LayerKind(window=2048, causal=True)

    def build():
        return block_mask.flex_mask(blocks, kind), block_mask.document_mask(start)

    build()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask, documents = build()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"both masks: peak {peak / 2**20:.1f} MiB", end="; ")
    assert peak < 64 << 20

    for name, make in (("blocks", lambda: block_mask.flex_mask(blocks, kind)), ("both", build)):
        begun = time.perf_counter()
        for _ in range(10):
            make()
        torch.cuda.synchronize()
        print(f"{name} {(time.perf_counter() - begun) * 100:.2f} ms", end="; ")
    for name, built in (("blocks", mask), ("documents", documents)):
        partial, full = int(built.kv_num_blocks.sum()), int(built.full_kv_num_blocks.sum())
        print(f"{name}: {partial} partial and {full} full tiles", end="; ")


def test_later_steps_with_new_masks_compile_nothing():
    def step(seed: int) -> None:
        blocks = make_blocks(slots=16, size=32, context=4 * TILE, document=60 + seed, seed=seed)
        plan = attention.flex_plan(blocks, KINDS)
        for kind in KINDS:
            run(plan, kind, inputs(blocks, torch.bfloat16, seed=seed))

    step(0)
    compiled = {name: dict(counted) for name, counted in counters.items()}
    assert compiled["stats"]["unique_graphs"] == 1  # of all kinds together
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(1, 4):
            step(seed)
    assert {name: dict(counted) for name, counted in counters.items()} == compiled


def test_a_compiled_call_takes_little_memory_and_a_plain_one_is_stopped():
    dense_guard.check()
    blocks = make_blocks(slots=256, size=32, context=4096, document=1000, seed=6, rows=1)
    leaves = inputs(blocks, torch.bfloat16, heads=8, kv_heads=2)
    plan = attention.flex_plan(blocks, KINDS[:1])
    run(plan, KINDS[0], leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(plan, KINDS[0], leaves)
    scores = attention.score_bytes(leaves[0], blocks.keys)
    assert torch.cuda.max_memory_allocated() - before < scores / 4
    query, key, value, own_key, own_value = leaves
    key, value = torch.cat([key, own_key], dim=2), torch.cat([value, own_value], dim=2)
    mask = block_mask.flex_mask(blocks, KINDS[0])
    with pytest.raises(dense_guard.DenseAttentionError, match=r"12288 keys, 3 GiB for one copy"):
        attention.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


def test_a_backward_pass_that_would_build_scores_is_stopped_in_autograds_thread():
    blocks = make_blocks(slots=16, size=16, context=2 * TILE, document=100, seed=7)
    query, key, value, own_key, own_value = inputs(blocks, torch.float32)
    key, value = torch.cat([key, own_key], dim=2), torch.cat([value, own_value], dim=2)
    mask = block_mask.flex_mask(blocks, KINDS[0])
    call = torch.compile(attention.flex_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    with dense_guard.allow_dense(1 << 30):
        result = call(query, key, value, block_mask=mask, enable_gqa=True)
    with pytest.raises(dense_guard.DenseAttentionError, match="GiB"):
        result.sum().backward()
