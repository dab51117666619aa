"""What a step trains on: which rows, where blocks stand in them, and what every slot has to predict.

All of it is a pure function of (rows, seed, step), computed on the CPU: resuming needs no sampler state, and how a
step is split over ranks and micro-batches changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from trainer import anchors
from trainer.data.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch: R rows of S tokens with N blocks each of B slots, and its M supervised slots.

    The supervised slots come in the order of their blocks, cut into chunks of `chunk` entries so that no block is in
    two chunks. A chunk's free end is filled with entries of index 0 and weight 0.
    """

    rows: Rows  # R rows
    anchors: Tensor  # [R, N] int64, sorted along each row
    keep: Tensor  # [R, N] bool
    slot: Tensor  # [M] int64, index into the R * N * B draft slots
    label: Tensor  # [M] int64, the token that the slot predicts
    weight: Tensor  # [M] float32
    source: Tensor  # [M] int64, index into the R * S tokens: where the target forms its distribution for the label
    block: Tensor  # [M] int64, 0 … R * N - 1
    position: Tensor  # [M] int64, which prediction of its block this is, 0 the first
    chunk: int
    weight_sum: float

    def to(self, device: torch.device | str) -> "Batch":
        """A copy there. Towards a GPU it goes through pinned memory and does not wait."""
        device = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        def moved(of):
            values = {each.name: getattr(of, each.name) for each in fields(of)}
            return replace(of, **{name: move(value) for name, value in values.items() if isinstance(value, Tensor)})

        return replace(moved(self), rows=moved(self.rows))


def order(seed: int, step: int, *, rows: int, rows_per_step: int) -> Tensor:
    """Row numbers of a step [rows_per_step]: every row once an epoch, in an order that is new each epoch.

    A pure function of (seed, step). A step may span two epochs or more.
    """
    places = range(step * rows_per_step, (step + 1) * rows_per_step)
    orders = {epoch: np.random.default_rng((seed, 0, epoch)).permutation(rows) for epoch in {p // rows for p in places}}
    return torch.tensor([orders[place // rows][place % rows] for place in places])


def micro_batches(
    rows: Rows,
    *,
    seed: int,
    step: int,
    rows_per_step: int,
    parts: int,
    anchors_per_row: int,
    width: int,
    block: int,
    shifted: bool,
    gamma: float | None,
    chunk: int,
    pad: bool,
    draw: int = 0,
    anchor_seed: int | None = None,
    only: Sequence[int] | None = None,
) -> list[Batch]:
    """The step's rows in `parts` equal parts (of all ranks together), or only the parts named.

    `width` slots a row hold up to `anchors_per_row` blocks. `gamma` None leaves every weight 1. `pad` fills the last
    chunk too, and makes one chunk of padding where nothing is supervised, so that shapes are multiples of `chunk`.
    `draw` 1, 2, … and `anchor_seed` (default: seed) give the same rows other anchors.
    """
    batches = []
    for part in range(parts) if only is None else only:
        first, taken = part_rows(rows, part, seed=seed, step=step, rows_per_step=rows_per_step, parts=parts)
        anchor, keep = anchors.draw(
            seed if anchor_seed is None else anchor_seed,
            step,
            allowed=anchors.eligible(taken),
            slots=anchors_per_row,
            width=width,
            first=first,
            number=draw,
        )
        batches.append(supervise(taken, anchor, keep, block=block, shifted=shifted, gamma=gamma, chunk=chunk, pad=pad))
    return batches


def part_rows(rows: Rows, part: int, *, seed: int, step: int, rows_per_step: int, parts: int) -> tuple[int, Rows]:
    """One part of a step's rows, and the number of its first row in the step."""
    if rows_per_step % parts:
        raise ValueError(f"{rows_per_step} rows a step do not split into {parts} parts")
    size = rows_per_step // parts
    index = order(seed, step, rows=len(rows), rows_per_step=rows_per_step)
    return part * size, rows.take(index[part * size : (part + 1) * size])


def supervise(
    rows: Rows, anchors: Tensor, keep: Tensor, *, block: int, shifted: bool, gamma: float | None, chunk: int, pad: bool
) -> Batch:
    """The batch of these blocks; anchors and keep [R, N].

    Prediction p of the block at anchor a is token a + p + 1, of which the target forms its distribution at a + p. In
    place (as published) slot p + 1 makes it, so slot 0, which holds the known token, predicts nothing; shifted, slot p
    does. It weighs exp(-p / gamma), since a draft counts only if all before it were right, and nothing if its token is
    not generated text of the anchor's document.
    """
    predictions = block if shifted else block - 1
    if predictions > chunk:
        raise ValueError(f"a chunk of {chunk} does not hold the {predictions} predictions of a block")
    length = rows.tokens.shape[1]
    tokens, generated = rows.tokens.numpy().reshape(-1), rows.generated.numpy().reshape(-1)
    decay = np.ones(predictions, np.float32)
    if gamma is not None:
        decay = torch.exp(-torch.arange(predictions) / gamma).numpy()

    begin = anchors.numpy() + np.arange(len(rows))[:, None] * length  # [R, N] index into all tokens
    left = rows.end.gather(1, anchors).numpy() - anchors.numpy() - 1  # [R, N] tokens of the document after the anchor
    left = np.where(keep.numpy(), left, 0).reshape(-1, 1)
    step = np.arange(predictions)
    source = begin.reshape(-1, 1) + step  # [R * N, P]
    label = np.minimum(source + 1, tokens.size - 1)  # what lies behind a document is masked by `left`
    entries = np.flatnonzero((step < left) & generated[label] & (decay > 0))

    number, position = np.divmod(entries, predictions)
    place, total = chunk_places(np.bincount(number, minlength=begin.size), chunk)
    if pad:
        total = max(-(-total // chunk), 1) * chunk

    def placed(values: np.ndarray) -> Tensor:
        out = np.zeros(total, values.dtype)
        out[place] = values
        return torch.from_numpy(out)

    return Batch(
        rows=rows,
        anchors=anchors,
        keep=keep,
        slot=placed(number * block + position + (0 if shifted else 1)),
        label=placed(tokens[label.reshape(-1)[entries]]),
        weight=placed(decay[position]),
        source=placed(source.reshape(-1)[entries]),
        block=placed(number),
        position=placed(position),
        chunk=chunk,
        weight_sum=float(decay[position].sum(dtype=np.float64)),
    )


def chunk_places(counts: np.ndarray, chunk: int) -> tuple[np.ndarray, int]:
    """Where entries go, if blocks of `counts` entries fill chunks in order, each block whole in the first with room.

    Returns the place of every entry and the end of the last.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    place = np.arange(total)
    first = chunks = 0  # the chunk's first entry, and its number
    while first < total:
        stop = int(ends[np.searchsorted(ends, first + chunk, side="right") - 1])  # of the last block that fits
        place[first:stop] += chunks * chunk - first
        first, chunks = stop, chunks + 1
    return place, int(place[-1]) + 1 if total else 0
