"""One training step: micro-batches through target and drafter, then one update.

Losses are summed, not averaged; the weight of the whole step divides once, in the optimizer. So a step is the same
however its rows are split, and one without a single anchor still takes place: its gradient is zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer import attention
from trainer.attention import Attend
from trainer.block_mask import Blocks
from trainer.config import Config
from trainer.data.batches import Batch
from trainer.head import head_pass
from trainer.loss import Objective
from trainer.metrics import TrainingMetrics, training_metrics
from trainer.models import Models
from trainer.optimizer import Optimizer
from trainer.spans import Spans
from trainer.target import Target
from trainer.world import World

# what the target says of a batch: last hidden states [R, S, H] or None, and features [R, S, K*H]
Source = Callable[[Batch], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What a step has before it changes anything; on the device."""

    metrics: TrainingMetrics
    norm: Tensor  # scalar, of the gradient of the mean loss
    stopping: Tensor  # scalar, how many of the ranks want this step to be the last


def objective_of(config: Config) -> Objective:
    loss = config.loss
    return Objective(
        cross_entropy=loss.cross_entropy,
        kl=loss.kl,
        tv=loss.tv,
        temperature=loss.temperature,
        weights=loss.weights,
        alpha=loss.alpha,
    )


def compiles(config: Config, device: torch.device) -> bool:
    """Whether the head's arithmetic is compiled; then batches are padded to whole chunks."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def blocks_of(batch: Batch, block_size: int) -> Blocks:
    return Blocks(
        start=batch.rows.start.gather(1, batch.anchors),
        anchor=batch.anchors,
        keep=batch.keep,
        context=batch.rows.tokens.shape[1],
        size=block_size,
    )


def draft(
    models: Models, batch: Batch, features: Tensor, attend: Attend, *, block_size: int, mask_token: int
) -> Tensor:
    """One block at every anchor [R, N] -> hidden [R, N*B, H]. Slot j of anchor a stands at position pos(a) + j, and
    holds the token itself at j = 0, the mask elsewhere."""
    drafter, rows = models.drafter, batch.rows
    tokens = torch.full((*batch.anchors.shape, block_size), mask_token, device=features.device)
    tokens[..., 0] = rows.tokens.gather(1, batch.anchors)
    position = rows.position
    slots = position.gather(1, batch.anchors)[..., None] + torch.arange(block_size, device=features.device)
    noise = models.vocabulary.embedding[tokens.flatten(1)].to(drafter.dtype)
    return drafter.from_features(features.to(drafter.dtype), position, noise, slots.flatten(1), attend)


def compute_gradient(
    config: Config,
    models: Models,
    optimizer: Optimizer,
    batches: list[Batch],
    spans: Spans,
    *,
    source: Source | None = None,
    world: World | None = None,
    stopping: bool = False,
) -> Gradient:
    """Gradients of all micro-batches of all ranks, added up and divided by the weight of the whole step.

    `source` gives what the target says of a batch; by default the target is asked, which must be here then.
    """
    objective = objective_of(config)
    if source is None:
        source = partial(inspect, models.target, last=objective.distils)
    predictions = config.drafter.block_size - (0 if config.drafter.shifted else 1)
    measured = weight = None
    for waiting in batches:
        with spans("copy"):
            batch = waiting.to(models.vocabulary.device)
        with spans("target"):
            last, features = source(batch)
        with spans("mask"):
            attend = attention_plan(config, models, batch)
        with spans("forward"):
            hidden = draft(
                models,
                batch,
                features,
                attend,
                block_size=config.drafter.block_size,
                mask_token=config.drafter.mask_token,
            )
            del features
        with spans("loss"):
            result = head_pass(
                hidden.flatten(0, 1)[batch.slot],
                models.vocabulary.head.to(hidden.dtype),
                label=batch.label,
                weight=batch.weight,
                block=batch.block,
                position=batch.position,
                chunk=batch.chunk,
                objective=objective,
                teacher=None if last is None else last.flatten(0, 1),
                source=batch.source,
                compiled=compiles(config, batch.label.device),
            )
            figures = training_metrics(
                result,
                weight=batch.weight,
                block=batch.block,
                position=batch.position,
                blocks=batch.anchors.numel(),
                positions=predictions,
            )
            measured = figures if measured is None else measured + figures
            weight = result.weight if weight is None else weight + result.weight
            del hidden
        with spans("backward"):
            result.total.backward()
    with spans("reduce"):
        # one vector for all that is not a gradient, so that ranks decide alike about stopping and diverging
        vector = torch.cat([measured.pairs.flatten(), weight.double()[None], weight.new_tensor([stopping]).double()])
        if world is not None:
            world.sum([vector, *optimizer.unsummed_gradients()])
        measured, weight = TrainingMetrics(pairs=vector[:-2].view(-1, 2)), vector[-2]
    with spans("norm"):
        norm = optimizer.gradient_norm(weight)
    return Gradient(metrics=measured, norm=norm, stopping=vector[-1])


def inspect(target: Target, batch: Batch, *, last: bool) -> tuple[Tensor | None, Tensor]:
    return target.inspect(batch.rows.tokens, batch.rows.start, last=last)


def attention_plan(config: Config, models: Models, batch: Batch) -> Attend:
    blocks = blocks_of(batch, config.drafter.block_size)
    if config.attention == "dense":
        return attention.dense_plan(blocks)
    return attention.flex_plan(blocks, models.drafter.kinds)
