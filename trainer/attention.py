"""The only place that computes attention, and the only caller of flex attention.

Two ways, with the same results. Flex attention runs one compiled kernel over the tiles that are seen and never has the
scores in memory; without a GPU it has no backward pass. The dense way builds scores, so it refuses shapes beyond a
bound. Both give zeros, and no gradient, to a query that sees nothing.

A plan is made once for a batch's blocks and serves every drafter layer:
    attend(kind, query [R, Hq, N*B, d], (key, value) of the context, each [R, Hkv, S, d],
           (key, value) of the blocks, each [R, Hkv, N*B, d]) -> [R, Hq, N*B, d]
Query head h uses head h // (Hq / Hkv) of keys and values; the scale is d^-1/2.

Flex takes head sizes that are not a power of two as they are: its kernel rounds them up and masks the rest. On a GPU
the least size is 16. It has no float64. Importing this module installs the guard of dense_guard.py.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer import block_mask, compile_report, dense_guard
from trainer.block_mask import Blocks, LayerKind
from trainer.errors import TrainerError

dense_guard.install()

DENSE_BYTES = 1 << 30  # of one copy of the scores; softmax and its gradient need a few copies
KeysValues = tuple[Tensor, Tensor]
Attend = Callable[[LayerKind, Tensor, KeysValues, KeysValues], Tensor]


def flex_plan(blocks: Blocks, kinds: Iterable[LayerKind]) -> Attend:
    """Flex attention for layers of `kinds`. S and N*B must be multiples of 128, else TrainerError."""
    masks = {kind: block_mask.flex_mask(blocks, kind) for kind in dict.fromkeys(kinds)}

    def attend_flex(kind: LayerKind, query: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        key, value = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
        with compile_report.graph("drafter attention", "forward"):
            return _flex(query, key, value, masks[kind])

    return attend_flex


def dense_plan(blocks: Blocks, *, bound: int = DENSE_BYTES) -> Attend:
    """Builds scores between blocks and context and inside each block, not between blocks.

    The call raises TrainerError if one copy of these scores takes more than `bound` bytes.
    """
    count, size = blocks.anchor.shape[1], blocks.size
    nothing = ~blocks.keep[:, None, None, :, None, None]

    @cache
    def hidden(kind: LayerKind) -> tuple[Tensor, Tensor]:
        """What may not be seen: of the context [R, 1, 1, N, B, S], and of a query's own block [B, B]."""
        context, _ = block_mask.intervals(blocks, kind)
        sees = block_mask.inside(context, blocks.context).unflatten(1, (count, size))
        later = torch.ones(size, size, dtype=torch.bool, device=sees.device).triu(1)
        return ~sees[:, None, None], later & kind.causal

    def attend_dense(kind: LayerKind, query: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        shape, dtype, kv_heads = query.shape, query.dtype, context[0].shape[1]
        _refuse_beyond(bound, score_bytes(query, blocks.context + size))
        query, *context, own_key, own_value = _widen(query, *context, *block)
        key, value = context
        own_key, own_value = (own.unflatten(2, (1, count, size)) for own in (own_key, own_value))
        query = query.unflatten(1, (kv_heads, -1)).unflatten(3, (count, size)) * shape[-1] ** -0.5  # [R,Hkv,G,N,B,d]
        no_context, later = hidden(kind)
        outer = (query.flatten(2, 4) @ key.mT).unflatten(2, query.shape[2:5])  # [R, Hkv, G, N, B, S]
        inner = query @ own_key.mT  # [R, Hkv, G, N, B, B]
        least = torch.finfo(query.dtype).min
        scores = torch.cat([outer.masked_fill(no_context, least), inner.masked_fill(later, least)], dim=-1)
        outer, inner = scores.softmax(-1).split([blocks.context, size], dim=-1)
        mixed = (outer.flatten(2, 4) @ value).unflatten(2, query.shape[2:5]) + inner @ own_value
        return mixed.masked_fill(nothing, 0).reshape(shape).to(dtype)

    return attend_dense


def document_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Flex attention of packed rows: query [R, Hq, S, d], key and value [R, Hkv, S, d], mask of `document_mask`."""
    with compile_report.graph("target attention", "forward"):
        return _flex(query, key, value, mask)


def dense_document_attention(
    query: Tensor, key: Tensor, value: Tensor, allow: Tensor, *, bound: int = DENSE_BYTES
) -> Tensor:
    """`attend`, but TrainerError if one copy of the scores takes more than `bound` bytes."""
    _refuse_beyond(bound, score_bytes(query, key.shape[2]))
    return attend(query, key, value, allow)


def attend(query: Tensor, key: Tensor, value: Tensor, allow: Tensor) -> Tensor:
    """The plain twin of everything above: query [R, Hq, Q, d], key and value [R, Hkv, K, d], allow [R, Q, K] bool.

    Computes in float32 or wider, and returns the query's type, [R, Hq, Q, d].
    """
    shape, dtype = query.shape, query.dtype
    query, key, value = _widen(query, key, value)
    query = query.unflatten(1, (key.shape[1], -1)) * shape[-1] ** -0.5  # [R, Hkv, G, Q, d]
    scores = (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4])
    weights = scores.masked_fill(~allow[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
    mixed = (weights.flatten(2, 3) @ value).view(shape)
    return mixed.masked_fill(~allow.any(-1)[:, None, :, None], 0).to(dtype)


def score_bytes(query: Tensor, keys: int) -> int:
    """Bytes of one copy of the scores of query [R, Hq, Q, d] with so many keys, in the type that they have here."""
    return query.shape[:3].numel() * keys * max(4, query.element_size())


def _widen(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _refuse_beyond(bound: int, size: int) -> None:
    if size > bound:
        raise TrainerError(
            f"dense attention would build scores of {size} bytes ({size / 2**30:.3g} GiB) a copy, over its bound of "
            f"{bound}; set `attention: flex` on a GPU, or make rows, blocks or the batch smaller"
        )


@cache
def _compiled() -> Callable[..., Tensor]:
    """fullgraph: what cannot be compiled is an error. Not dynamic: a kernel for exactly each shape, made once."""
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    if query.dtype == torch.float64:
        raise TrainerError("flex attention does not compute in float64; set `attention: dense`")
    if query.is_cuda and query.shape[-1] < 16:
        raise TrainerError(f"flex attention needs heads of at least 16, not {query.shape[-1]}; set `attention: dense`")
    if not query.is_cuda and torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise TrainerError("flex attention has no backward pass without a GPU; set `attention: dense`")
    return _compiled()(query, key, value, block_mask=mask, enable_gqa=True)
