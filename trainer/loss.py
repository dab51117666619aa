"""What a block is trained for: slot j of the block anchored at `a` predicts token a + j, for j = 1 … B-1.

Slot 0 holds the known token and is not supervised. Slot j weighs exp(-(j - 1) / gamma), since a draft counts only if
all before it were right, and nothing if token a + j is not generated text of the anchor's document.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.data import Rows
from trainer.metrics import Metrics


def labels_and_weights(rows: Rows, anchors: Tensor, keep: Tensor, *, block: int, gamma: float) -> tuple[Tensor, Tensor]:
    """anchors and keep [R, N] -> labels [R, N, B-1] int64 and weights [R, N, B-1]."""
    length = rows.tokens.shape[1]
    slot = torch.arange(1, block, device=anchors.device)
    index = anchors[..., None] + slot  # [R, N, B-1]
    inside = index.clamp(max=length - 1).flatten(1)
    labels = rows.tokens.gather(1, inside).view(index.shape)
    generated = rows.generated.gather(1, inside).view(index.shape)
    counts = keep[..., None] & (index < rows.end.gather(1, anchors)[..., None]) & generated
    return labels, counts * torch.exp(-(slot - 1) / gamma)


def teacher(hidden: Tensor, head: Tensor, anchors: Tensor, *, block: int, temperature: float) -> Tensor:
    """The target's distribution for every supervised slot, which it forms one token earlier, at a + j - 1.

    hidden [R, S, H] (after the final norm), head [V, H], anchors [R, N] -> probabilities [R, N, B-1, V].
    """
    index = anchors[..., None] + torch.arange(block - 1, device=anchors.device)
    index = index.clamp(max=hidden.shape[1] - 1)
    chosen = hidden.gather(1, index.flatten(1)[..., None].expand(-1, -1, hidden.shape[2]))
    return ((chosen @ head.T).float() / temperature).softmax(-1).unflatten(1, index.shape[1:])


def block_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, distribution: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Weighted cross entropy, summed; divide by the weight of the whole (global) batch. Against `distribution`
    [R, N, B-1, V] if there is one, else against the labels.

    hidden [R, N, B, H], head [V, H], labels and weights [R, N, B-1] -> sum, and metrics as (numerator, denominator).
    """
    logits = (hidden[:, :, 1:] @ head.T).float()
    wanted = labels.flatten() if distribution is None else distribution.flatten(0, 2)
    nll = F.cross_entropy(logits.flatten(0, 2), wanted, reduction="none").view_as(labels)
    total = (weights * nll).sum()
    with torch.no_grad():
        counts = weights > 0
        right = (logits.argmax(-1) == labels) & counts
        leading = right.long().cumprod(-1).sum(-1)  # [R, N]
        blocks = counts[..., 0]
        metrics = {
            "loss": (total.item(), weights.sum().item()),
            "first_slot_accuracy": (right[..., 0].sum().item(), blocks.sum().item()),
            "accepted_in_training": ((leading + blocks)[blocks].sum().item(), blocks.sum().item()),
        }
    return total, metrics
