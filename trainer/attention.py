"""The only place that computes the drafter's attention.

Eager: scores are built, which small shapes allow. `attend_blocks` builds only those between blocks and context and
those inside each block; `attend` is its plain twin over all keys at once, with the dense mask of block_mask.py.
"""

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, allow: Tensor) -> Tensor:
    """Grouped-query attention with scale d^-1/2.

    query [R, Hq, Q, d], key and value [R, Hkv, K, d], allow [R, Q, K] bool -> [R, Hq, Q, d]. Head h of the queries
    uses head h // (Hq / Hkv) of keys and values. A query that may see nothing gets zeros, and no gradient.
    """
    shape = query.shape
    query = query.unflatten(1, (key.shape[1], -1)) * shape[-1] ** -0.5  # [R, Hkv, G, Q, d]
    scores = (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4])
    scores = scores.masked_fill(~allow[:, None, None], torch.finfo(scores.dtype).min)
    mixed = scores.softmax(-1).flatten(2, 3) @ value
    return mixed.view(shape) * allow.any(-1)[:, None, :, None]


def attend_blocks(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    sees: Tensor,
    keep: Tensor,
) -> Tensor:
    """Every block attends to its own context and to itself.

    query [R, Hq, N*B, d], context keys and values [R, Hkv, S, d], block keys and values [R, Hkv, N*B, d],
    sees [R, N, S] bool (the context of each block), keep [R, N] bool -> [R, Hq, N*B, d].
    """
    shape, blocks = query.shape, sees.shape[1]
    groups = context[0].shape[1]
    query = query.unflatten(1, (groups, -1)).unflatten(3, (blocks, -1)) * shape[-1] ** -0.5  # [R, Hkv, G, N, B, d]
    own_key, own_value = (tensor.unflatten(2, (1, blocks, -1)) for tensor in block)  # [R, Hkv, 1, N, B, d]
    outer = (query.flatten(2, 4) @ context[0].mT).unflatten(2, query.shape[2:5])  # [R, Hkv, G, N, B, S]
    outer = outer.masked_fill(~sees[:, None, None, :, None], torch.finfo(outer.dtype).min)
    inner = query @ own_key.mT  # [R, Hkv, G, N, B, B]
    weights = torch.cat([outer, inner], dim=-1).softmax(-1)
    outer, inner = weights.split([outer.shape[-1], inner.shape[-1]], dim=-1)
    mixed = (outer.flatten(2, 4) @ context[1]).unflatten(2, query.shape[2:5]) + inner @ own_value
    return (mixed * keep[:, None, None, :, None, None]).reshape(shape)
