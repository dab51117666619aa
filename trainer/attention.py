"""The only place that computes the drafter's attention. Eager: it builds the scores, which small shapes allow."""

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, allow: Tensor) -> Tensor:
    """Grouped-query attention with scale d^-1/2.

    query [R, Hq, Q, d], key and value [R, Hkv, K, d], allow [R, Q, K] bool -> [R, Hq, Q, d]. Head h of the queries
    uses head h // (Hq / Hkv) of keys and values. A query that may see nothing gets zeros, and no gradient.
    """
    rows, heads, length, size = query.shape
    groups = key.shape[1]
    folded = query.reshape(rows, groups, heads // groups * length, size) * size**-0.5
    scores = (folded @ key.mT).view(rows, groups, heads // groups, length, -1)
    scores = scores.masked_fill(~allow[:, None, None], torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    mixed = weights.flatten(2, 3) @ value
    sees = allow.any(dim=-1)[:, None, :, None]
    return mixed.view(rows, heads, length, size) * sees
