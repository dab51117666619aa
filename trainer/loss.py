"""The loss of a supervised slot, its weight, and the plain head pass that head.py's chunked one is held equal to.

q is the drafter's distribution for a slot (temperature 1), p the target's, softmax(target logits / temperature): at a
temperature other than 1 the drafter learns the tempered distribution itself. The loss of a slot is a mixture of

    cross entropy  -log q(label)
    forward KL     KL(p || q) = sum_v p_v (log p_v - log q_v)
    TV             sum_v |q_v - p_v| / 2

and that of a batch the sum of weight * loss over its slots. A draft counts only if all before it in its block were
right, hence the weights: a decay made with the batch, or D-PACE, which follows the drafter's own probabilities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is learned: the mixture of losses, and how slots are weighted."""

    cross_entropy: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    temperature: float = 1.0  # of the target's distribution
    weights: str = "decay"  # or "dpace"
    alpha: float = 0.5  # D-PACE's smoothing

    @property
    def distils(self) -> bool:
        """Whether the target's distribution is needed."""
        return bool(self.kl or self.tv)


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """What the head says of the M supervised entries of a batch. Entries of weight 0 are padding: 0 in all of it."""

    total: Tensor  # scalar, differentiable with respect to hidden: sum of weight * loss, not normalised
    weight: Tensor  # scalar: sum of the weights used
    nll: Tensor  # [M] -log q(label)
    rank: (
        Tensor  # [M] int32: how many logits exceed the label's; 0 is a hit of the greedy draft, < k one among the top k
    )


def dpace_weights(nll: Tensor, counted: Tensor, block: Tensor, position: Tensor, *, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): a slot weighs as much as the expected acceptance that depends on it.

    With q_i the probability of a slot's label, s_i = (1 - alpha) q_i + alpha and C_j = prod_{i <= j} s_i, the weight is
    w_j = sum_{m >= j} C_m. i, j, m run over the counted slots of one block in order of position: one that is not
    counted stands for a factor of 1 and has no term, and weighs 0.

    nll [n] of the labels, counted [n] bool, block and position [n] int64 -> [n], without gradient. Compares all pairs,
    n * n of them, so it is meant for the entries of one chunk; each block must be there whole.
    """
    smoothed = (1 - alpha) * (-nll.detach()).exp() + alpha
    together = (block[:, None] == block) & counted
    survival = torch.where(together & (position <= position[:, None]), smoothed, 1.0).prod(1)
    weight = torch.where(together & (position >= position[:, None]), survival, 0.0).sum(1)
    return torch.where(counted, weight, 0.0)


def plain_head_pass(
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
    """head.head_pass by autograd on whole [M, V] logits; arguments and result are the same, `chunk` changes nothing."""
    counted = weight > 0
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden = torch.where(counted[:, None], hidden, 0.0)  # zeros, not masked losses: 0 * inf would leave NaN gradients
    logits = (hidden @ head.T.to(hidden.dtype)).to(wide)
    nll = F.cross_entropy(logits, label, reduction="none")
    rank = (logits > logits.gather(1, label[:, None])).sum(1, dtype=torch.int32)
    used = weight.to(wide)
    if objective.weights == "dpace":
        used = dpace_weights(nll, counted, block, position, alpha=objective.alpha)
    loss = objective.cross_entropy * nll
    if objective.distils:
        if teacher is None or source is None:
            raise ValueError("the objective compares with the target's distribution: pass teacher and source")
        wanted = (teacher.detach()[source] @ head.T.to(teacher.dtype)).to(wide) / objective.temperature
        log_q, log_p = logits.log_softmax(1), wanted.log_softmax(1)
        loss = loss + objective.kl * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
        loss = loss + objective.tv * 0.5 * (log_q.exp() - log_p.exp()).abs().sum(1)
    return HeadResult(
        total=torch.where(counted, used * loss, 0.0).sum(),
        weight=used.sum(),
        nll=torch.where(counted, nll, 0.0).detach(),
        rank=torch.where(counted, rank, 0),
    )
