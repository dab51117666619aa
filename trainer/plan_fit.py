"""Whether a rank fits its card, which settings would make it fit and by how much, and settings that do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from trainer.config import TILE, Config
from trainer.plan_memory import Ledger, Setting, drafter_rank, target_rank
from trainer.plan_sizes import Sizes, sizes_of

# An allowance, not a measurement: the CUDA context and libraries, and what the allocator holds in pieces that fit
# nothing. Peaks of plan_memory are of memory in use.
CONTEXT, PIECES = 1 << 30, 0.03
SHARED_FROM = 0.75  # of a card: what auto shards beyond, as sharding.ROOM has it
LARGEST_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that takes less memory."""

    setting: str  # as --set takes it
    gain: int  # bytes of the fullest rank
    costs: str  # what is paid for it
    same: bool  # whether the run learns the same, to rounding


def needed(peak: int) -> int:
    """Bytes of a card for such a peak, with the allowance."""
    return round(peak * (1 + PIECES)) + CONTEXT


def ranks_of(config: Config) -> int:
    """That train this drafter."""
    return max(config.plan.drafters)


def state_of(sizes: Sizes, config: Config) -> int:
    """Of a whole copy, as `sharding.state_bytes` has it."""
    narrow = sizes.bytes < sizes.wide
    each = sizes.bytes + sizes.wide * (1 + narrow + bool(config.optimizer.ema))
    matrices = sizes.drafter - sizes.gains
    states = matrices + 2 * sizes.gains if config.optimizer.kind == "muon" else 2 * sizes.drafter
    return sizes.drafter * each + states * sizes.wide


def shards_of(sizes: Sizes, config: Config, ranks: int, memory: int | None) -> int:
    """Ranks that share a drafter out. auto, on a card of unknown size, counts as whole."""
    asked = config.topology.shard
    if ranks == 1 or asked == "off" or (asked == "auto" and memory is None):
        return 1
    numbers = sizes.vocabulary
    if config.topology.mode == "colocated":
        numbers = sizes.target.numbers or numbers
    fits = state_of(sizes, config) + numbers * sizes.target_bytes <= SHARED_FROM * (memory or 0)
    return ranks if asked == "on" or not fits else 1


def drafter_memory(config: Config, *, ranks: int, memory: int | None = None) -> Ledger:
    """Of the fullest rank that trains this drafter. Raises TrainerError."""
    sizes = sizes_of(config)
    setting = Setting(
        checkpointing=config.activation_checkpointing,
        muon=config.optimizer.kind == "muon",
        average=config.optimizer.ema > 0,
        parts=-(-config.plan.parts // ranks),
        draws=config.data.anchor_draws,
        colocated=config.topology.mode == "colocated",
        shards=shards_of(sizes, config, ranks, memory),
    )
    return drafter_rank(sizes, setting)


def peak_of(config: Config, memory: int | None = None) -> int:
    """Bytes of the fullest rank of all. Raises TrainerError."""
    peaks = [drafter_memory(each, ranks=ranks, memory=memory).peak for each, ranks in drafters_of(config)]
    if config.topology.mode == "split":
        peaks.append(target_rank(stream_sizes(config)).peak)
    return max(peaks)


def drafters_of(config: Config) -> list[tuple[Config, int]]:
    """Each drafter's configuration, with the run's topology, and its ranks."""
    if not config.variants:
        return [(config, ranks_of(config))]
    whole = {"variants": config.variants, "topology": config.topology}
    return [
        (replace(variant.config, **whole), ranks)
        for variant, ranks in zip(config.variants, config.plan.drafters, strict=True)
    ]


def stream_sizes(config: Config) -> Sizes:
    """Of what targets make, which is the most that any of the drafters wants."""
    sizes = [sizes_of(each) for each, _ in drafters_of(config)]
    return next((each for each in sizes if each.distils), sizes[0])


def with_drafters(config: Config, **changed: object) -> Config:
    """The configuration, and those of its drafters, with these of its settings."""
    variants = tuple(replace(each, config=replace(each.config, **changed)) for each in config.variants)
    return replace(config, variants=variants, **changed)


def changes(config: Config, memory: int | None = None) -> list[Change]:
    """All that take less, the largest gain first."""
    now = peak_of(config, memory)
    found = []
    for setting, changed, costs, same in _candidates(config):
        gain = now - peak_of(changed, memory)
        if gain > 0:
            found.append(Change(setting=setting, gain=gain, costs=costs, same=same))
    return sorted(found, key=lambda change: -change.gain)


def _candidates(config: Config) -> Iterator[tuple[str, Config, str, bool]]:
    data, loss, optimizer, topology = config.data, config.loss, config.optimizer, config.topology
    if not config.activation_checkpointing:
        changed = with_drafters(config, activation_checkpointing=True)
        yield "activation_checkpointing=true", changed, "each layer runs forward twice", True
    for parts in _more_parts(config)[:1]:
        changed = with_drafters(config, data=replace(data, micro_batches=parts))
        yield f"data.micro_batches={parts}", changed, "smaller matrix products", True
    if not config.variants:
        for chunk in _chunks(config):
            if chunk < loss.chunk:
                changed = replace(config, loss=replace(loss, chunk=chunk))
                yield f"loss.chunk={chunk}", changed, "more and smaller products of the head", True
                break
        if optimizer.ema:
            changed = replace(config, optimizer=replace(optimizer, ema=0.0))
            yield "optimizer.ema=0", changed, "evaluation and export take the last weights", False
        if optimizer.kind == "adamw":
            changed = replace(config, optimizer=replace(optimizer, kind="muon"))
            yield "optimizer.kind=muon", changed, "another optimizer, with its own rate", False
        if loss.anchors_per_row >= 2:
            half = loss.anchors_per_row // 2
            changed = replace(config, loss=replace(loss, anchors_per_row=half))
            yield f"loss.anchors_per_row={half}", changed, "half as many slots are learnt from in a step", False
    if data.anchor_draws > 1:
        changed = with_drafters(config, data=replace(data, anchor_draws=1))
        yield "data.anchor_draws=1", changed, "the target reads new rows for every step", False
    if topology.shard != "on" and max(config.plan.drafters) > 1:
        changed = replace(config, topology=replace(topology, shard="on"))
        yield "topology.shard=on", changed, "weights are gathered and gradients scattered, layer by layer", True
    if topology.mode == "colocated":
        split = replace(topology, mode="split", ranks=1, targets=1, drafters=topology.ranks, present=0)
        changed = replace(config, topology=split)
        yield "topology.mode=split", changed, "another GPU, for the target", True


def _more_parts(config: Config) -> list[int]:
    """Larger settings of data.micro_batches that rows_per_step allows."""
    rows, drafters = config.data.rows_per_step, lcm(*config.whole_plan.drafters)
    most = rows // drafters
    return [parts for parts in range(config.data.micro_batches + 1, most + 1) if rows % (parts * drafters) == 0]


def _chunks(config: Config) -> list[int]:
    """Sizes of a chunk, the best first. A chunk of whole blocks and whole tiles of 128 rows wastes neither; where there
    is none below LARGEST_CHUNK, a power of two. Smaller ones follow, each about half of the one before."""
    sizes = sizes_of(config)
    predictions = sizes.predictions
    whole = lcm(predictions, TILE)
    best = LARGEST_CHUNK // whole * whole if whole <= LARGEST_CHUNK else 0
    found = sorted({best or 2048, 2048, 1024, 512, 256}, reverse=True)
    return [chunk for chunk in found if chunk >= max(predictions, config.drafter.block_size)]


def choose(config: Config, memory: int) -> tuple[Config, list[str]] | None:
    """The fastest settings of those that learn the same and fit: chunk of the head, then micro-batches, then activation
    checkpointing; -> the configuration and its changes as --set takes them, or None where nothing fits.

    With several drafters, chunks stay as they are: each has its own.
    """
    for checkpointing in dict.fromkeys([config.activation_checkpointing, True]):
        for parts in [config.data.micro_batches, *_more_parts(config)]:
            for chunk in [config.loss.chunk] if config.variants else dict.fromkeys([*_chunks(config)]):
                data = replace(config.data, micro_batches=parts)
                changed = with_drafters(config, data=data, activation_checkpointing=checkpointing)
                if not config.variants:
                    changed = replace(changed, loss=replace(config.loss, chunk=chunk))
                if needed(peak_of(changed, memory)) <= memory:
                    return changed, _told(config, changed)
    return None


def _told(config: Config, changed: Config) -> list[str]:
    pairs = (
        ("activation_checkpointing", config.activation_checkpointing, changed.activation_checkpointing),
        ("data.micro_batches", config.data.micro_batches, changed.data.micro_batches),
        ("loss.chunk", config.loss.chunk, changed.loss.chunk),
    )
    return [f"{name}={str(new).lower()}" for name, old, new in pairs if old != new]
