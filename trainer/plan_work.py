"""Arithmetic of a step in floating-point operations, a multiply-add counted as two, and how long it takes at rates
that were measured.

Of a part with T draft slots, S tokens and M rows of the head: each matrix [m, n] of a layer takes 2 T m n forward and
twice that backward; `k_proj` and `v_proj` the same for S tokens of context; `fc` 2 S K H H forward and as much
backward, since features need no gradient; the head 2 M V H forward, as much for the gradient, and once more for the
distribution of the target. Attention counts the 128 x 128 tiles that run, whole: 4 * 128 * 128 * d a head forward, 2.5
times that backward.
"""

import random
from dataclasses import dataclass

from trainer.config import TILE
from trainer.plan_sizes import Sizes

# spans in which a step is measured, see step.py; what else there is (copies, mask, norms) goes with the optimizer
SPANS = ("target", "forward", "loss", "backward")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured on one kind of GPU, at one shape."""

    flops: dict[str, float]  # a second, by span
    update: float  # seconds a parameter, of AdamW with clipping, and all spans that are not in `flops`
    source: str


@dataclass(frozen=True, kw_only=True)
class Card:
    name: str
    memory: int  # bytes, as CUDA tells
    rates: Rates | None


# The production shape of benchmarks/production_shape.py: `work` of it by the medians that docs/trainer.md has.
CARDS = (
    Card(
        name="NVIDIA H200",
        memory=139 << 30,
        rates=Rates(
            flops={"target": 447e12, "forward": 520e12, "loss": 653e12, "backward": 513e12},
            update=0.020 / 1.0486e9,
            source="python benchmarks/production_shape.py --steps 24, torch 2.11, 5 layers of width 4096, 1024 anchors "
            "of 32 slots in rows of 40,064 tokens",
        ),
    ),
)


def card_named(name: str) -> Card | None:
    """By its whole name or a part of it, such as h200; None where no such card, or more than one, has been measured."""
    found = [card for card in CARDS if name.lower() in card.name.lower() or card.name.lower() in name.lower()]
    return found[0] if len(found) == 1 else None


def work(sizes: Sizes, *, documents: int, checkpointing: bool = False) -> dict[str, float]:
    """FLOPs of one part of a step, by span; rows hold documents of so many tokens, and all anchors are kept."""
    s, t, h = sizes.tokens, sizes.slots, sizes.target.hidden
    noise = 2.0 * t * sizes.layer_matrices * sizes.layers
    context = 2.0 * s * h * 2 * sizes.key_width * sizes.layers
    fc = 2.0 * s * sizes.features * h * h
    seen = sum(attention_tiles(sizes, window, documents=documents) for window in sizes.windows)
    attention = 4.0 * TILE * TILE * sizes.query_width * seen * sizes.rows
    head = 2.0 * sizes.entries * sizes.target.vocabulary * h
    again = noise + context + attention - 2.0 * t * h * sizes.intermediate * sizes.layers  # all but down_proj
    return {
        "target": target_work(sizes, documents=documents),
        "forward": noise + context + fc + attention,
        "loss": head * (3 if sizes.distils else 2),
        "backward": 2 * noise + 2 * context + fc + 2.5 * attention + (again if checkpointing else 0),
    }


def target_work(sizes: Sizes, *, documents: int) -> float:
    """Of a part's rows through a Llama-like target, up to the last captured layer."""
    target, s = sizes.target, sizes.tokens
    width = (target.heads + target.kv_heads) * 2 * target.head_size
    matrices = target.hidden * width + 3 * target.hidden * target.intermediate
    mean_context = (min(documents, sizes.length) + 1) / 2
    attention = 4.0 * s * mean_context * target.heads * target.head_size
    return sizes.captured_to * (2.0 * s * matrices + attention)


def attention_tiles(sizes: Sizes, window: int, *, documents: int) -> int:
    """Tiles that one row of one layer runs, with anchors drawn at random (always the same ones)."""
    draw, length = random.Random(0), sizes.length
    anchors = sorted(draw.sample(range(length), min(sizes.anchors, length)))
    total = 0
    for first in range(0, sizes.blocks * sizes.block, TILE):
        blocks = range(first // sizes.block, (first + TILE - 1) // sizes.block + 1)
        tiles: set[int] = set()
        for anchor in anchors[blocks.start : blocks.stop]:
            lo = anchor // documents * documents
            lo = max(lo, anchor - window + 1) if window else lo
            tiles.update(range(lo // TILE, -(-anchor // TILE)) if lo < anchor else ())
        own = length + blocks.start * sizes.block, length + min(blocks.stop, sizes.blocks) * sizes.block
        tiles.update(range(own[0] // TILE, -(-own[1] // TILE)))
        total += len(tiles)
    return total


def seconds(flops: dict[str, float], rates: Rates) -> dict[str, float]:
    """Of each span, at the measured rate."""
    return {span: flops[span] / rates.flops[span] for span in SPANS}
