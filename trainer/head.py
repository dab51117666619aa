"""Vocabulary head, softmax, losses and ranks in one pass over chunks of slots; [M, V] logits never exist.

The head is frozen, so a chunk's gradient with respect to `hidden` can be formed as soon as its logits are there, which
costs two matrix products a chunk (three with a teacher) and no second look at the logits. Backward only scales it.

With q = softmax(z) of the drafter's logits z and p the target's distribution (loss.py has the losses), dq_i/dz_k =
q_i (1[i = k] - q_k), so

    cross entropy  log q(y) = z_y - logsumexp(z)            ->  d/dz = q - onehot(y)
    forward KL     -sum p_i log q_i + const, sum p_i = 1    ->  d/dz = q - p
    TV             dTV/dq_i = s_i = sign(q_i - p_i) / 2     ->  d/dz_k = q_k (s_k - sum_i q_i s_i)

and the gradient of hidden is weight * d/dz @ head. What is pointwise or a reduction is compiled on a GPU, so that
beside a chunk's logits, the target's, and the gradient, all in hidden's dtype, nothing of [chunk, V] is held.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer import compile_report
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
    compiled: bool | None = None,
) -> HeadResult:
    """Weighted loss, NLL and rank of the M supervised entries of a batch (`data.batches.Batch` has their order).

    hidden [M, H] after the drafter's final norm; head [V, H], frozen, in hidden's dtype (else it is converted once);
    label, block, position [M] int64; weight [M], 0 for padding, which contributes nothing whatever its hidden row;
    teacher [T, H] the target's last hidden states, of which entry m is compared with row source[m].

    Logits are in hidden's dtype, everything after them in float32 (float64 if hidden is), the gradient in hidden's
    dtype. Of logits that are equal, as rounding to bfloat16 makes them, none exceeds the other: a label that ties for
    the first place has rank 0, a hit, although a greedy draft may name the other token.

    Under D-PACE no block may straddle a border between chunks. Nothing here waits for the device. `compiled` (None: on
    a GPU) runs the same arithmetic compiled; shapes are those of `chunk` alone then, so M must be a multiple of it, as
    on any GPU. Raises ValueError where it is not, or where the objective needs a teacher and there is none.
    """
    compiled = hidden.is_cuda if compiled is None else compiled
    if objective.distils and (teacher is None or source is None):
        raise ValueError("the objective compares with the target's distribution: pass teacher and source")
    if (compiled or hidden.is_cuda) and len(hidden) % chunk:
        raise ValueError(f"{len(hidden)} entries are no multiple of a chunk, {chunk}: pad them with weight 0")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    states, head = hidden.detach(), head.detach().to(hidden.dtype)
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    gradient = torch.empty_like(states, memory_format=torch.contiguous_format) if with_gradient else None
    measure, slope = _compiled() if compiled else (_measure, _slope)
    chunks = []
    with torch.no_grad():
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = states[part] @ head.T
            wanted = teacher[source[part]].to(hidden.dtype) @ head.T if objective.distils else None
            rest = label[part], weight[part].to(wide), block[part], position[part]
            with compile_report.graph("head pass", "reductions"):
                known = measure(logits, wanted, *rest, objective)
            if gradient is not None:
                with compile_report.graph("head pass", "gradient"):
                    torch.mm(slope(logits, wanted, label[part], known, objective), head, out=gradient[part])
            chunks.append(known[:4])
            del logits, wanted, known  # before the next chunk's are made
        if not chunks:  # a batch without entries
            chunks = [(*weight.new_empty(3, 0, dtype=wide), label.new_empty(0, dtype=torch.int32))]
        loss, used, nll, rank = (torch.cat(each) for each in zip(*chunks, strict=True))
        total = (used * loss).sum()
    if gradient is not None:
        total = _WithGradient.apply(hidden, total, gradient)
    return HeadResult(total=total, weight=used.sum(), nll=nll, rank=rank)


class _Known(NamedTuple):
    """Of each slot of a chunk: what is reported, and what its gradient needs of the whole row of logits."""

    loss: Tensor  # [chunk], 0 for padding, as the next three
    weight: Tensor
    nll: Tensor
    rank: Tensor
    log_sum: Tensor  # [chunk, 1] log sum exp of the logits
    wanted_log_sum: Tensor | None  # the same of the target's
    lean: Tensor | None  # [chunk, 1] sum_i q_i s_i


def _measure(
    logits: Tensor,
    wanted: Tensor | None,
    label: Tensor,
    weight: Tensor,
    block: Tensor,
    position: Tensor,
    objective: Objective,
) -> _Known:
    """From a chunk's logits [chunk, V] and, for distillation, the target's: reductions over V, in weight's dtype."""
    z, counted = logits.to(weight.dtype), weight > 0
    at_label = z.gather(1, label[:, None])
    log_sum = z.logsumexp(1, keepdim=True)
    nll = torch.where(counted, (log_sum - at_label)[:, 0], 0.0)
    rank = torch.where(counted, (z > at_label).sum(1, dtype=torch.int32), 0)
    if objective.weights == "dpace":
        weight = dpace_weights(nll, counted, block, position, alpha=objective.alpha)
    loss = objective.cross_entropy * nll
    wanted_log_sum = lean = None
    if wanted is not None:
        t = wanted.to(weight.dtype) / objective.temperature
        wanted_log_sum = t.logsumexp(1, keepdim=True)
        log_q, log_p = z - log_sum, t - wanted_log_sum
        q, p = log_q.exp(), log_p.exp()
        if objective.kl:
            loss = loss + objective.kl * (p * (log_p - log_q)).sum(1)
        if objective.tv:
            loss = loss + objective.tv * 0.5 * (q - p).abs().sum(1)
            lean = 0.5 * (q * (q - p).sign()).sum(1, keepdim=True)
    return _Known(torch.where(counted, loss, 0.0), weight, nll, rank, log_sum, wanted_log_sum, lean)


def _slope(logits: Tensor, wanted: Tensor | None, label: Tensor, known: _Known, objective: Objective) -> Tensor:
    """The gradient of weight * loss with respect to the logits, [chunk, V] in their dtype.

    Pointwise, what it needs of whole rows is in `known`: in one graph with the reductions the compiler would rather
    keep a float32 [chunk, V] tensor for both than form q and p again from the logits.
    """
    weight = known.weight[:, None]
    q = (logits.to(weight.dtype) - known.log_sum).exp()
    slope = (objective.cross_entropy + objective.kl) * q
    if objective.cross_entropy:
        one_hot = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
        slope = slope - objective.cross_entropy * one_hot.to(q.dtype)
    if wanted is not None:
        t = wanted.to(weight.dtype) / objective.temperature
        p = (t - known.wanted_log_sum).exp()
        if objective.kl:
            slope = slope - objective.kl * p
        if objective.tv:
            slope = slope + objective.tv * q * (0.5 * (q - p).sign() - known.lean)
    return torch.where(weight > 0, weight * slope, 0.0).to(logits.dtype)


@functools.cache
def _compiled() -> tuple[Callable[..., _Known], Callable[..., Tensor]]:
    """Traced at the first call with an objective and a shape."""
    options = {"dynamic": False, "fullgraph": True}
    return torch.compile(_measure, **options), torch.compile(_slope, **options)


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
