"""Vocabulary head, softmax, losses and ranks in one pass over chunks of slots; [M, V] logits never exist.

The head is frozen, so a chunk's gradient with respect to `hidden` can be formed as soon as its logits are there, which
costs two matrix products a chunk (three with a teacher) and no second look at the logits. Backward only scales it.

With q = softmax(z) of the drafter's logits z and p the target's distribution (loss.py has the losses), dq_i/dz_k =
q_i (1[i = k] - q_k), so

    cross entropy  log q(y) = z_y - logsumexp(z)            ->  d/dz = q - onehot(y)
    forward KL     -sum p_i log q_i + const, sum p_i = 1    ->  d/dz = q - p
    TV             dTV/dq_i = s_i = sign(q_i - p_i) / 2     ->  d/dz_k = q_k (s_k - sum_i q_i s_i)

and the gradient of hidden is weight * d/dz @ head. On a GPU all that is pointwise or a reduction is compiled, so that
beside the logits of a chunk and their gradient, both in hidden's dtype, nothing of [chunk, V] is held.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.loss import HeadResult, Objective, dpace_weights

__all__ = ["HeadResult", "Objective", "head_pass"]


def head_pass(
    hidden: Tensor,
    head: Tensor,
    *,
    label: Tensor,
    weight: Tensor,
    block: Tensor,
    position: Tensor,
    chunk: int,
    objective: Objective,
    teacher: Tensor | None = None,
    source: Tensor | None = None,
) -> HeadResult:
    """Weighted loss, NLL and rank of the M supervised entries of a batch (`data.batches.Batch` has their order).

    hidden [M, H] after the drafter's final norm; head [V, H], frozen, in hidden's dtype (else it is converted once);
    label, block, position [M] int64; weight [M], 0 for padding, which contributes nothing whatever its hidden row;
    teacher [T, H] the target's last hidden states, of which entry m is compared with row source[m].

    Logits are in hidden's dtype, everything after them in float32 (float64 if hidden is), the gradient in hidden's
    dtype. Of logits that are equal, as rounding to bfloat16 makes them, none exceeds the other: a label that ties for
    the first place has rank 0, a hit, although a greedy draft may name the other token.

    Under D-PACE no block may straddle a border between chunks. Nothing here waits for the device, and shapes are those
    of `chunk` alone, so on a GPU M must be a multiple of it. Raises ValueError where it is not, or where the objective
    needs a teacher and there is none.
    """
    if objective.distils and (teacher is None or source is None):
        raise ValueError("the objective compares with the target's distribution: pass teacher and source")
    if hidden.is_cuda and len(hidden) % chunk:
        raise ValueError(f"{len(hidden)} entries are no multiple of a chunk, {chunk}: pad them with weight 0")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    states, head = hidden.detach(), head.detach().to(hidden.dtype)
    gradient = torch.empty_like(states, memory_format=torch.contiguous_format) if with_gradient else None
    rows = _compiled() if hidden.is_cuda else _rows
    # three lists of [chunk] tensors; the empty ones make a batch without entries no special case
    losses, weights, nlls = ([hidden.new_empty(0, dtype=wide)] for _ in range(3))
    ranks = [label.new_empty(0, dtype=torch.int32)]
    with torch.no_grad():
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            wanted = None
            if objective.distils:
                wanted = teacher[source[part]].to(hidden.dtype) @ head.T
            logits = states[part] @ head.T
            done = rows(
                logits,
                wanted,
                label[part],
                weight[part].to(wide),
                block[part],
                position[part],
                objective,
                with_gradient,
            )
            del logits, wanted
            losses.append(done.loss)
            weights.append(done.weight)
            nlls.append(done.nll)
            ranks.append(done.rank)
            if gradient is not None:
                torch.mm(done.gradient, head, out=gradient[part])
            del done
        used = torch.cat(weights)
        total = (used * torch.cat(losses)).sum()
    if gradient is not None:
        total = _WithGradient.apply(hidden, total, gradient)
    return HeadResult(total=total, weight=used.sum(), nll=torch.cat(nlls), rank=torch.cat(ranks))


class _Rows(NamedTuple):
    loss: Tensor  # [chunk], like all but the last; 0 for padding
    weight: Tensor
    nll: Tensor
    rank: Tensor
    gradient: Tensor | None  # [chunk, V] of weight * loss with respect to the logits, in their dtype


def _rows(
    logits: Tensor,
    wanted: Tensor | None,
    label: Tensor,
    weight: Tensor,
    block: Tensor,
    position: Tensor,
    objective: Objective,
    with_gradient: bool,
) -> _Rows:
    """What follows from a chunk's logits [chunk, V] and, for distillation, the target's (before the temperature).

    Written so that it compiles into reductions over V and one pointwise kernel: no scatter, no use of a [chunk, V]
    intermediate that costs more to form again than to read.
    """
    z = logits.to(weight.dtype)
    counted = weight > 0
    at_label = z.gather(1, label[:, None])
    log_sum = z.logsumexp(1, keepdim=True)
    nll = torch.where(counted, (log_sum - at_label)[:, 0], 0.0)
    rank = torch.where(counted, (z > at_label).sum(1, dtype=torch.int32), 0)
    if objective.weights == "dpace":
        weight = dpace_weights(nll, counted, block, position, alpha=objective.alpha)

    q = (z - log_sum).exp()
    loss = objective.cross_entropy * nll
    slope = (objective.cross_entropy + objective.kl) * q
    if objective.cross_entropy:
        one_hot = torch.arange(z.shape[1], device=z.device) == label[:, None]
        slope = slope - objective.cross_entropy * one_hot.to(z.dtype)
    if wanted is not None:
        t = wanted.to(weight.dtype) / objective.temperature
        log_p = t - t.logsumexp(1, keepdim=True)
        p = log_p.exp()
        if objective.kl:
            loss = loss + objective.kl * (p * (log_p - (z - log_sum))).sum(1)
            slope = slope - objective.kl * p
        if objective.tv:
            loss = loss + objective.tv * 0.5 * (q - p).abs().sum(1)
            sign = 0.5 * (q - p).sign()
            slope = slope + objective.tv * q * (sign - (q * sign).sum(1, keepdim=True))
    gradient = None
    if with_gradient:
        gradient = torch.where(counted[:, None], weight[:, None] * slope, 0.0).to(logits.dtype)
    return _Rows(torch.where(counted, loss, 0.0), weight, nll, rank, gradient)


@functools.cache
def _compiled() -> Callable[..., _Rows]:
    """Compiled when first called, once for each objective and with or without a gradient."""
    return torch.compile(_rows, dynamic=False, fullgraph=True)


class _WithGradient(torch.autograd.Function):
    """`total`, whose gradient with respect to `hidden` is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # as [1, 1] the factor keeps its precision; a 0-d one would be rounded to bfloat16 first, and all rows with it
        return torch.mul(gradient, scale.reshape(1, 1), out=torch.empty_like(gradient)), None, None
