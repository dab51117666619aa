"""What steps read: the rows of the configuration's files, the batches of a step, the shape of what targets send."""

from functools import partial

import torch
from transformers import PretrainedConfig

from trainer import anchors, block_mask
from trainer.config import Config
from trainer.data import rows as packing
from trainer.data import sources
from trainer.data.batches import Batch, micro_batches, part_rows, supervise
from trainer.data.chat import load_tokenizer
from trainer.errors import TrainerError
from trainer.models import captured_layers
from trainer.pipeline import Parcel
from trainer.step import objective_of
from trainer.target import choose_dtype


def load_rows(config: Config, vocabulary: int, *, speak: bool = True) -> tuple[packing.Rows, list[packing.Document]]:
    """All rows of the configuration's files. With `speak`, what was skipped and cut is printed."""
    documents, report = sources.load_documents(
        config.data.paths,
        tokenizer=partial(load_tokenizer, config.target.path),
        vocabulary=vocabulary,
        template=config.data.template,
        broken_share=config.data.broken_share,
        piece=config.data.row_length,
    )
    rows = packing.pack(documents, config.data.row_length, padding=config.drafter.mask_token)
    warnings = report.warnings()
    if rows.cut:
        warnings.append(
            f"{rows.cut} documents are longer than a row; only their first {config.data.row_length} tokens are used"
        )
    for line in warnings if speak else ():
        print(f"warning: {line}")
    if not anchors.eligible(rows).any():
        where = ", ".join(map(str, config.data.paths))
        raise TrainerError(f"{where}: no row has two generated tokens in a row, so there is nothing to learn")
    return rows, documents


def step_batches(
    config: Config,
    rows: packing.Rows,
    number: int,
    *,
    pad: bool,
    parts: int | None = None,
    only: list[int] | None = None,
    order_seed: int | None = None,
) -> list[Batch]:
    """All that a step reads, or only some of its parts; a pure function of the seed and the step.

    `order_seed` is that of the targets' stream, where a variant has a seed of its own.
    """
    drafter, loss, data = config.drafter, config.loss, config.data
    step, draw = divmod(number, data.anchor_draws)
    return micro_batches(
        rows,
        seed=config.seed if order_seed is None else order_seed,
        step=step,
        rows_per_step=data.rows_per_step,
        parts=parts or config.plan.parts,
        anchors_per_row=loss.anchors_per_row,
        width=anchor_slots(config),
        block=drafter.block_size,
        shifted=drafter.shifted,
        gamma=None if loss.weights == "dpace" else loss.gamma,
        chunk=loss.chunk,
        pad=pad,
        draw=draw,
        anchor_seed=config.seed,
        only=only,
    )


def anchor_slots(config: Config) -> int:
    """Of a row; flex attention wants whole tiles of them."""
    if config.attention == "flex":
        return block_mask.padded_slots(config.loss.anchors_per_row, config.drafter.block_size)
    return config.loss.anchors_per_row


def made_up(config: Config, *, rows: int) -> Batch:
    """A batch of the shapes of any other: one document a row, anchors evenly spread."""
    count, length = rows, config.data.row_length
    index = torch.arange(length).expand(count, -1)
    made = packing.Rows(
        tokens=torch.zeros(count, length, dtype=torch.int64),
        start=torch.zeros_like(index),
        end=torch.full_like(index, length),
        generated=torch.ones(count, length, dtype=torch.bool),
        used=count * length,
    )
    slots, block = anchor_slots(config), config.drafter.block_size
    anchor = torch.linspace(0, max(0, length - block - 1), slots).long().expand(count, -1).contiguous()
    return supervise(
        made,
        anchor,
        torch.ones(count, slots, dtype=torch.bool),
        block=block,
        shifted=config.drafter.shifted,
        gamma=None if config.loss.weights == "dpace" else config.loss.gamma,
        chunk=config.loss.chunk,
        pad=True,
    )


def rows_of_batch(config: Config, rows: packing.Rows, batch: int) -> packing.Rows:
    """The rows of the targets' batch of this number: part p of data step s is batch s * P + p."""
    parts = config.plan.parts
    step, part = divmod(batch, parts)
    _, taken = part_rows(rows, part, seed=config.seed, step=step, rows_per_step=config.data.rows_per_step, parts=parts)
    return taken


def parcel_of(config: Config, target: PretrainedConfig, device: torch.device) -> Parcel:
    """Last hidden states travel if any variant compares with the target's distribution."""
    configs = [variant.config for variant in config.variants] or [config]
    layers = {captured_layers(each.drafter, target) for each in configs}
    if len(layers) > 1:
        raise TrainerError("all of `drafters` must be trained on the same target layers: set drafter.target_layers")
    return Parcel(
        rows=config.data.rows_per_step // config.plan.parts,
        length=config.data.row_length,
        features=len(layers.pop()) * target.hidden_size,
        hidden=target.hidden_size if any(objective_of(each).distils for each in configs) else 0,
        dtype=choose_dtype(config.target.dtype, device),
    )
