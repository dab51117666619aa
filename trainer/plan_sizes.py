"""Sizes of a configuration, from its settings and the target's config.json alone: no torch, and no weights are read.

Names are those of docs/trainer.md: R rows of S tokens are one part of a step, N blocks a row of B slots, K captured
layers, H the target's width, V its vocabulary. Where torch-side code computes the same thing, a test holds them equal.
"""

import json
import struct
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

from trainer.config import TILE, Config
from trainer.errors import TrainerError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    hidden: int  # H
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    vocabulary: int  # V
    tied: bool  # whether the head is the embedding
    model: str  # its kind, such as qwen3
    numbers: int | None  # parameters in all; None where neither its files nor its settings tell


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one drafter, and of one part of its step: what a rank has in work at a time."""

    target: TargetSizes
    rows: int  # R
    length: int  # S
    blocks: int  # N, rounded up to whole tiles of slots
    anchors: int  # of the N, those that can be anchored
    block: int  # B
    predictions: int  # supervised slots of a block, at most
    entries: int  # M, supervised slots of a part when all are, filled up to whole chunks
    chunk: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    windows: tuple[int, ...]  # by layer, 0 where it does not slide
    features: int  # K
    captured_to: int  # the target's layers 0 … captured_to - 1 are run
    bytes: int  # of a number that the drafter computes with
    target_bytes: int  # of a number of the target's
    distils: bool

    @property
    def wide(self) -> int:
        """Bytes of a master weight: float32 or wider."""
        return max(4, self.bytes)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def slots(self) -> int:
        return self.rows * self.blocks * self.block

    @property
    def query_width(self) -> int:
        return self.heads * self.target.head_size

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.target.head_size

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """[out, in] of every matrix of the drafter, `fc` first."""
        h, i, q, k = self.target.hidden, self.intermediate, self.query_width, self.key_width
        layer = [(q, h), (k, h), (k, h), (h, q), (i, h), (i, h), (h, i)]
        return [(h, self.features * h), *layer * self.layers]

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of one layer."""
        return sum(rows * columns for rows, columns in self.matrices[1:8])

    @property
    def gains(self) -> int:
        """Numbers in all norms: two of the width and two of a head in each layer, and two beside the layers."""
        return self.layers * 2 * (self.target.hidden + self.target.head_size) + 2 * self.target.hidden

    @property
    def drafter(self) -> int:
        """Parameters of the drafter."""
        return sum(rows * columns for rows, columns in self.matrices) + self.gains

    @property
    def vocabulary(self) -> int:
        """Numbers in the target's embedding, head and final norm."""
        return self.target.vocabulary * self.target.hidden * (1 if self.target.tied else 2) + self.target.hidden

    @property
    def feature_bytes(self) -> int:
        """Of one part: features and, where a loss compares distributions, last hidden states."""
        return self.tokens * (self.features + self.distils) * self.target.hidden * self.target_bytes


def sizes_of(config: Config) -> Sizes:
    """Raises TrainerError where the target's config.json does not say enough."""
    target = read_target(config.target.path)
    drafter, loss, data = config.drafter, config.loss, config.data
    predictions = drafter.block_size - (0 if drafter.shifted else 1)
    blocks = padded_blocks(loss.anchors_per_row, drafter.block_size, flex=config.attention == "flex")
    rows = data.rows_per_step // config.plan.parts
    captured = drafter.target_layers or spread(target.layers, drafter.features)
    if list(captured) != sorted(set(captured)) or min(captured) < 0:
        raise TrainerError(
            f"the target has {target.layers} layers, too few to spread {drafter.features} features over; name some in "
            "drafter.target_layers"
        )
    distils = bool(loss.kl or loss.tv)
    slides = set(drafter.sliding_layers or range(drafter.layers)) if drafter.sliding_window else set()
    return Sizes(
        target=target,
        rows=rows,
        length=data.row_length,
        blocks=blocks,
        anchors=min(loss.anchors_per_row, data.row_length),
        block=drafter.block_size,
        predictions=predictions,
        entries=entries_of(rows * min(loss.anchors_per_row, data.row_length), predictions, loss.chunk),
        chunk=loss.chunk,
        layers=drafter.layers,
        intermediate=drafter.intermediate or target.intermediate,
        heads=drafter.heads or target.heads,
        kv_heads=drafter.kv_heads or target.kv_heads,
        windows=tuple(drafter.sliding_window if layer in slides else 0 for layer in range(drafter.layers)),
        features=len(captured),
        captured_to=target.layers if distils else max(captured) + 1,
        bytes=BYTES[computes_in(config.dtype, config.device)],
        target_bytes=BYTES[computes_in(config.target.dtype, config.device)],
        distils=distils,
    )


def computes_in(dtype: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU, and a plan is of a GPU unless the configuration names the CPU."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def spread(layers: int, features: int) -> tuple[int, ...]:
    """The layers that are captured where none are named (`models.spread_layers`)."""
    if features == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (features - 1)) for i in range(features))


def padded_blocks(blocks: int, size: int, *, flex: bool) -> int:
    """Blocks of a row (`feed.anchor_slots`): flex attention wants whole tiles of slots."""
    unit = TILE // gcd(TILE, size) if flex else 1
    return -(-blocks // unit) * unit


def entries_of(blocks: int, predictions: int, chunk: int) -> int:
    """Rows of the head, every prediction of every block supervised: no block straddles two chunks
    (`batches.chunk_places`), and the last chunk is filled up."""
    return -(-blocks // (chunk // predictions)) * chunk


def read_target(path: Path) -> TargetSizes:
    """Raises TrainerError."""
    file = path / "config.json"
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        hidden, heads = int(said["hidden_size"]), int(said["num_attention_heads"])
        layers, vocabulary = int(said["num_hidden_layers"]), int(said["vocab_size"])
        intermediate = int(said["intermediate_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{file}: does not tell the target's sizes ({error!r}); fetch the model anew") from None
    head_size = int(said.get("head_dim") or hidden // heads)
    kv_heads, tied = int(said.get("num_key_value_heads") or heads), bool(said.get("tie_word_embeddings", False))
    numbers = _numbers_in_files(path)
    if numbers is None and not _has_experts(said):
        width = (heads + kv_heads) * 2 * head_size
        numbers = layers * (hidden * width + 3 * hidden * intermediate) + (1 if tied else 2) * vocabulary * hidden
    return TargetSizes(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        layers=layers,
        vocabulary=vocabulary,
        tied=tied,
        model=str(said.get("model_type", "unknown")),
        numbers=numbers,
    )


def _has_experts(said: dict[str, Any]) -> bool:
    return any(said.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _numbers_in_files(path: Path) -> int | None:
    """By the headers of its safetensors files, as they lie; None where one is missing or unreadable."""
    try:
        index = path / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        return sum(_numbers_in_file(path / name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def _numbers_in_file(path: Path) -> int:
    """A safetensors file begins with the length of its header, 8 bytes little-endian, and the header, JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > 100 << 20:  # the format's own bound
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
