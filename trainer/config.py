"""Settings: frozen dataclasses, read from one YAML file by config_reader.py, and what must hold between them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from trainer.config_reader import ConfigError, Reader, setting
from trainer.topology import Topology

__all__ = ["Config", "ConfigError", "load"]

DTYPES = ("auto", "bfloat16", "float32", "float64")  # auto: bfloat16 on a GPU, float32 on a CPU
TILE = 128  # of the block mask: rows and draft slots come in multiples of it


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    path: Path  # a Hugging Face causal LM: config.json and safetensors
    dtype: str = setting("auto", among=DTYPES)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    paths: tuple[Path, ...]  # files or globs, see data/sources.py
    row_length: int = setting(256, least=2)
    rows_per_step: int = setting(4, least=1)  # over all ranks and micro-batches
    micro_batches: int = setting(1, least=1)  # parts of a step on each rank, whose gradients are added up
    anchor_draws: int = setting(1, least=1)  # steps that train on the same rows and features, with fresh anchors
    template: dict[str, Any] = field(default_factory=dict)  # for the chat template, such as enable_thinking: false
    broken_share: float = setting(0.01, least=0, most=1)  # of unreadable records; with more the run stops


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Widths and the size of a head are the target's."""

    mask_token: int = setting(least=0)
    target_layers: tuple[int, ...] = setting((), least=0)  # captured; empty: `features` of them, evenly spread
    features: int = setting(5, least=1)
    layers: int = setting(5, least=1)
    block_size: int = setting(16, least=2)
    heads: int = setting(0, least=0)  # 0: as many as the target has
    kv_heads: int = setting(0, least=0)
    intermediate: int = setting(0, least=0)
    sliding_window: int = setting(0, least=0)  # keys that a query of a sliding layer sees, itself one; 0: none slides
    sliding_layers: tuple[int, ...] = setting((), least=0)  # empty: all layers, when there is a window
    causal: bool = False  # inside a block, in full layers (JetSpec)
    sliding_causal: bool = True  # inside a block, in sliding layers, as the serving engines have it
    shifted: bool = False  # slot k predicts the token after its own place, so slot 0 drafts too
    initial: Path | None = None  # begin with the weights of an exported drafter


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of a slot is a weighted sum of three; the last two compare with the target's whole distribution."""

    anchors_per_row: int = setting(512, least=1)
    cross_entropy: float = setting(1.0, least=0)
    kl: float = setting(0.0, least=0)  # forward: KL(target || drafter)
    tv: float = setting(0.0, least=0)  # total variation, half the L1 distance
    temperature: float = setting(1.0, least=1e-2)  # of the target's distribution
    weights: str = setting("decay", among=("decay", "dpace"))
    gamma: float = setting(7.0, least=1e-3)  # decay: slot j weighs exp(-(j - 1) / gamma)
    alpha: float = setting(0.5, least=0, most=1)  # D-PACE's smoothing
    chunk: int = setting(2048, least=1)  # rows whose logits exist at a time


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    kind: str = setting("muon", among=("muon", "adamw"))  # of matrices; everything else has AdamW
    muon_rate: float = setting(0.01, least=0)
    adam_rate: float = setting(6e-4, least=0)
    momentum: float = setting(0.95, least=0, most=1)
    beta1: float = setting(0.9, least=0, most=1)
    beta2: float = setting(0.95, least=0, most=1)
    weight_decay: float = setting(0.0, least=0)
    schedule: str = setting("wsd", among=("wsd", "cosine"))
    warmup: float = setting(0.02, least=0, most=1)  # shares of all steps
    decay: float = setting(0.5, least=0, most=1)  # of wsd: falls linearly at the end
    final: float = setting(0.0, least=0, most=1)  # share of the rate that is left at the end
    clip: float = setting(1.0, least=0)  # of the global gradient norm; 0 is off
    ema: float = setting(0.0, least=0, most=1)  # of the weights, used in evaluation and export; 0 is off


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = setting(200, least=1)
    keep: int = setting(2, least=1)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    prompts: Path | None = None
    new_tokens: int = setting(64, least=1)
    batch: int = setting(0, least=0)  # prompts decoded at once; 0: all. Published speed-ups are mostly of 1
    temperature: float = setting(0.7, least=1e-3)  # beside greedy decoding
    noise_seed: int = setting(0, least=0)  # of the sampling noise; not the run's, so that runs compare
    every: int = setting(0, least=0)  # a small evaluation now and then; 0 is never
    every_prompts: int = setting(8, least=1)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    tensorboard: bool = False
    wandb: str = setting("off", among=("off", "offline", "online"))
    wandb_project: str = "orch"


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    mode: str = setting("colocated", among=("colocated", "split"))
    ranks: int = setting(1, least=1)  # of colocated: each holds target and drafter
    targets: int = setting(1, least=1)  # of split: ranks that hold the target, the first ones
    drafters: int = setting(1, least=1)  # of split: ranks that train, unless `drafters:` lists them
    present: int = setting(0, least=0)  # how many of all these ranks there are; 0: all
    backend: str = setting("auto", among=("auto", "nccl", "gloo"))  # auto: nccl where every rank has a GPU of its own
    shard: str = setting("auto", among=("auto", "on", "off"))  # auto: a drafter that does not fit, see sharding.py
    timeout: float = setting(1800.0, least=1)  # seconds that any one wait for another rank may take


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of several drafters fed by the same targets: a whole configuration of its own, and how many ranks."""

    name: str
    ranks: int
    config: "Config"


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    variants: tuple[Variant, ...] = field(default=(), metadata={"key": None})  # made from the file's `drafters:`
    topology: TopologyConfig = TopologyConfig()
    steps: int = setting(least=1)
    seed: int = setting(0, least=0, most=(1 << 63) - 1)  # what torch takes
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = setting("auto", among=DTYPES)  # the drafter computes in it; master weights are float32 or wider
    attention: str = setting("flex", among=("flex", "dense"))  # dense builds the scores: for CPUs and tests
    activation_checkpointing: bool = False
    spike: float = setting(4.0, least=0)  # times the median of the last losses stops the run; 0 is off
    compile: str = setting("auto", among=("auto", "on", "off"))  # the head's arithmetic; auto: on a GPU
    threads: int = setting(0, least=0, most=4096)  # of torch on the CPU; 0 leaves torch's own choice
    print_every: int = setting(50, least=1)  # steps

    @property
    def plan(self) -> Topology:
        """Who does what, on the ranks that are there."""
        return self.whole_plan.on(self.topology.present) if self.topology.present else self.whole_plan

    @property
    def whole_plan(self) -> Topology:
        """Who does what where no rank is missing. `drafters:` of the file, where given, become the variants of
        `split`."""
        if self.topology.mode == "colocated":
            return Topology(drafters=(self.topology.ranks,), parts_per_rank=self.data.micro_batches)
        drafters = tuple(variant.ranks for variant in self.variants) or (self.topology.drafters,)
        return Topology(
            mode="split",
            targets=self.topology.targets,
            drafters=drafters,
            parts_per_rank=self.data.micro_batches,
        )


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read `path`, with `overrides` such as "optimizer.clip=0" laid over it. Raises ConfigError."""
    reader = Reader(path)
    root = reader.root(overrides or [])
    listed = reader.take(root, "drafters")
    config = reader.section(Config, root, "")
    if not reader.problems and listed is not None:
        variants = _variants(reader, root, listed)
        config = replace(config, variants=variants) if not reader.problems else config
    if not reader.problems:
        check_together(config, reader.problem_of)
        for variant in config.variants:
            check_together(variant.config, reader.problem_of)
        if len({(v.config.drafter.target_layers, v.config.drafter.features) for v in config.variants}) > 1:
            reader.problem_of("drafter.target_layers", "must be the same for all of `drafters`: one stream feeds them")
        if config.topology.shard == "on" and max(config.whole_plan.drafters) < 2:
            reader.problem_of("topology.shard", "is on, but no drafter has several ranks to be spread over; set auto")
    reader.raise_problems()
    return config


def _variants(reader: Reader, root: yaml.MappingNode, listed: yaml.Node) -> tuple[Variant, ...]:
    """Each entry of `drafters:` has a name, ranks, and whatever of the file's settings it changes."""
    if not isinstance(listed, yaml.SequenceNode) or not listed.value:
        reader.problem(listed, "`drafters` must be a list of drafters, each with a name")
        return ()
    variants: list[Variant] = []
    for entry in listed.value:
        if not isinstance(entry, yaml.MappingNode):
            reader.problem(entry, "a drafter of `drafters` must be a mapping with a name")
            continue
        for key in entry.value:
            if key[0].value not in VARIED:
                reader.problem(key[0], f"`drafters` cannot change `{key[0].value}`: only {', '.join(VARIED)}")
        head = yaml.MappingNode(
            entry.tag, [p for p in entry.value if p[0].value in ("name", "ranks")], entry.start_mark
        )
        head = reader.section(_VariantHead, head, "drafters.")
        changes = [p for p in entry.value if p[0].value not in ("name", "ranks")]
        config = reader.section(Config, reader.laid_over(root, changes), "")
        if config is not None:  # how many ranks there are is said of all drafters together
            config = replace(config, topology=replace(config.topology, present=0))
        if head is not None and not re.fullmatch(r"\w[\w.-]*", head.name):
            reader.problem(entry, f"`{head.name}` cannot be a drafter's name: letters, digits, _, - and . make up one")
        if head is not None and config is not None:
            if any(head.name == other.name for other in variants):
                reader.problem(entry, f"two of `drafters` are called {head.name}")
            variants.append(Variant(name=head.name, ranks=head.ranks, config=config))
    return tuple(variants)


VARIED = ("name", "ranks", "seed", "drafter", "loss", "optimizer")


@dataclass(frozen=True, kw_only=True)
class _VariantHead:
    name: str
    ranks: int = setting(1, least=1)


Problem = Callable[[str, str], None]  # the setting's full name, what is wrong


def check_together(config: Config, problem: Problem) -> None:
    """What no single setting shows: files that must be there, and settings that must agree."""
    if not (config.target.path / "config.json").is_file():
        problem("target.path", f"has no config.json: {config.target.path}")
    for path in config.data.paths:
        if not names_a_file(path):
            problem("data.paths", f"names no file: {path}")
    if config.evaluate.prompts is not None and not config.evaluate.prompts.is_file():
        problem("evaluate.prompts", f"is not a file: {config.evaluate.prompts}")
    if config.evaluate.every and config.evaluate.prompts is None:
        problem("evaluate.every", "needs `evaluate.prompts`")
    try:
        plan = config.plan
    except ValueError as error:
        problem("topology.present", f"cannot be {config.topology.present}: {error}")
        plan = config.whole_plan
    if config.data.rows_per_step % plan.parts:
        problem(
            "data.rows_per_step",
            f"must be a multiple of {plan.parts}, the parts of a step: micro_batches for each of the ranks that train",
        )
    topology, usual = config.topology, TopologyConfig()
    if config.variants and topology.mode != "split":
        problem("topology.mode", "must be split, where `drafters` lists several")
    elif topology.mode == "split" and topology.ranks != usual.ranks:
        problem("topology.ranks", "is of colocated; with split, give topology.targets and topology.drafters")
    elif topology.mode == "colocated" and (topology.targets, topology.drafters) != (usual.targets, usual.drafters):
        problem("topology.mode", "is colocated, to which targets and drafters say nothing: set it to split")
    elif config.variants and topology.drafters != usual.drafters:
        problem("topology.drafters", "says nothing where `drafters` lists several, each with its ranks")
    if config.variants and config.checkpoint.keep < 2:
        problem("checkpoint.keep", "must be at least 2 for several drafters, which resume from one step that all have")
    drafter, loss, device = config.drafter, config.loss, config.device
    if drafter.block_size > config.data.row_length:
        problem("drafter.block_size", f"is larger than a row ({config.data.row_length} tokens)")
    if len(set(drafter.target_layers)) != len(drafter.target_layers):
        problem("drafter.target_layers", "names a layer twice")
    elif list(drafter.target_layers) != sorted(drafter.target_layers):
        problem("drafter.target_layers", "must ascend: serving engines join the features in the order of the layers")
    if drafter.sliding_layers and max(drafter.sliding_layers) >= drafter.layers:
        problem("drafter.sliding_layers", f"goes beyond the drafter's last layer, {drafter.layers - 1}")
    if drafter.sliding_layers and not drafter.sliding_window:
        problem("drafter.sliding_layers", "needs `drafter.sliding_window`")
    if 0 < drafter.sliding_window < drafter.block_size:
        problem("drafter.sliding_window", f"must be at least a block, {drafter.block_size}")
    for name in ("beta1", "beta2", "momentum", "ema"):
        if getattr(config.optimizer, name) == 1:
            problem(f"optimizer.{name}", "must be less than 1, at which nothing new ever enters the average")
    if not (loss.cross_entropy or loss.kl or loss.tv):
        problem("loss.cross_entropy", "is 0, and so are kl and tv: there is nothing to learn")
    if loss.chunk < drafter.block_size:
        problem("loss.chunk", f"must hold a block, {drafter.block_size} rows")
    if config.attention == "flex":
        if config.data.row_length % TILE:
            longer = -(-config.data.row_length // TILE) * TILE
            problem("data.row_length", f"must be a multiple of {TILE} for flex attention, such as {longer}")
        if device == "cpu":
            problem("device", "cpu has no backward of flex attention; set `attention: dense`")
    if device not in ("auto", "cpu", "cuda") and not (device.startswith("cuda:") and device[5:].isdigit()):
        problem("device", f"must be auto, cpu, cuda or cuda:N, not `{device}`")
    _check_target(config, problem)


def names_a_file(path: Path) -> bool:
    """A file itself, or a glob that finds one."""
    try:
        return path.is_file() or any(path.parent.glob(path.name))
    except ValueError:  # the root, or ** beside other letters
        return False


def _check_target(config: Config, problem: Problem) -> None:
    try:
        target = json.loads((config.target.path / "config.json").read_text(encoding="utf-8"))
        layers, vocabulary = int(target["num_hidden_layers"]), int(target["vocab_size"])
    except OSError:
        return  # reported already
    except (ValueError, KeyError, TypeError):
        return problem("target.path", "has a config.json without num_hidden_layers and vocab_size")
    if layers < 1:
        problem("target.path", f"has a config.json that says num_hidden_layers: {layers}")
    heads = config.drafter.heads or target.get("num_attention_heads") or 1
    kv_heads = config.drafter.kv_heads or target.get("num_key_value_heads") or 1
    if not all(isinstance(each, int) and each > 0 for each in (heads, kv_heads)):
        problem("target.path", "has a config.json whose numbers of heads are not whole numbers above 0")
    elif heads % kv_heads:
        problem("drafter.kv_heads", f"must divide the number of heads, {heads}")
    if config.drafter.target_layers and max(config.drafter.target_layers) >= layers:
        problem("drafter.target_layers", f"goes beyond the target's last layer, {layers - 1}")
    if config.drafter.mask_token >= vocabulary:
        problem("drafter.mask_token", f"is outside the target's vocabulary of {vocabulary}")
