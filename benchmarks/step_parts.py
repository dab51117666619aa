"""What the benchmarks of a training step share: a target of random weights or its two ends, rows of documents of one
length, and steps taken as trainer/loop.py takes them, with features that are there already."""

import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import Qwen3Config

from benchmarks.production_shape import SHAPE, make_target
from trainer.config import Config, load
from trainer.data.batches import Batch
from trainer.data.prefetch import Prefetcher
from trainer.data.rows import Document, Rows, pack
from trainer.drafter import Drafter
from trainer.feed import parcel_of, step_batches
from trainer.metrics import ratio
from trainer.models import Models, choose_device, load_target, shape_of
from trainer.optimizer import Optimizer
from trainer.plan_sizes import Sizes, sizes_of
from trainer.source import Said
from trainer.spans import Spans
from trainer.step import compiles, compute_gradient, inspect, objective_of
from trainer.target import choose_dtype
from trainer.vocabulary import Vocabulary

TOY = {
    **SHAPE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 6, "eos_token_id": 0,
}  # fmt: skip
SETTINGS = {
    "production": {
        "data": {"row_length": 40064, "rows_per_step": 1},
        "drafter": {"mask_token": 151669, "layers": 5, "features": 5, "block_size": 32},
        "loss": {"anchors_per_row": 1024, "gamma": 7, "chunk": 2048},
    },
    "toy": {
        "device": "cpu",
        "attention": "dense",
        "data": {"row_length": 256, "rows_per_step": 1},
        "drafter": {"mask_token": 1, "layers": 2, "features": 3, "block_size": 8},
        "loss": {"anchors_per_row": 16, "gamma": 7, "chunk": 64},
    },
}


def configure(folder: Path, size: str, overrides: list[str]) -> Config:
    """A configuration like a user's, with a target's config.json beside it. Raises ConfigError."""
    target = folder / "target"
    target.mkdir(parents=True, exist_ok=True)
    shape = {**SHAPE, "num_hidden_layers": 36} if size == "production" else TOY
    if not (target / "config.json").exists():
        (target / "config.json").write_text(json.dumps(Qwen3Config(**shape).to_dict()))
    (folder / "data.jsonl").write_text('{"text": "made up in memory"}\n')
    content = {
        "name": "trainer-step",
        "steps": 100000,
        "target": {"path": "target"},
        "optimizer": {"kind": "adamw", "adam_rate": 1e-4},
        **SETTINGS[size],
    }
    content["data"] = {**content["data"], "paths": "data.jsonl"}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return load(folder / "config.yaml", overrides)


@dataclass(kw_only=True)
class Bench:
    """Everything that a step needs, on the device."""

    config: Config
    sizes: Sizes
    models: Models
    optimizer: Optimizer | None
    rows: Rows
    buffers: list[Said] = field(default_factory=list)  # empty: the target is asked
    taken: int = 0

    @property
    def device(self) -> torch.device:
        return self.models.vocabulary.device

    def source(self, batch: Batch) -> Said:
        if self.buffers:
            return self.buffers[0]
        return inspect(self.models.target, batch, last=objective_of(self.config).distils)

    def batches(self, count: int) -> Iterator[list[Batch]]:
        """Of the next steps, made ahead in a thread."""
        make = partial(step_batches, self.config, self.rows, pad=self.device.type == "cuda" or self.compiled)
        with Prefetcher(make, range(self.taken, self.taken + count)) as steps:
            yield from steps

    @property
    def compiled(self) -> bool:
        return compiles(self.config, self.device)

    def step(self, batches: list[Batch]) -> tuple[dict[str, float], float]:
        """As `loop._Run._take` has it; -> seconds of each span, and the loss."""
        spans = Spans(self.device)
        gradient = compute_gradient(
            self.config, self.models, self.optimizer, batches, spans, source=self.source, stopping=False
        )
        measured, _ = gradient.metrics.read()
        gradient.norm.item()
        with spans("optimizer"):
            self.optimizer.apply(self.taken, gradient.norm)
        self.taken += 1
        return spans.seconds(), ratio(measured["loss"])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over steps."""

    seconds: float
    spans: dict[str, float]
    first_loss: float
    peak: int  # bytes in use, 0 on a CPU
    reserved: int  # by torch's allocator
    outside: int  # bytes of the card that neither is: the CUDA context and libraries


def build(folder: Path, config: Config, *, documents: int, steps: int, colocated: bool = False) -> Bench:
    """Random weights from a fixed seed; features too, unless the target is here. Documents have `documents` tokens."""
    device, sizes = choose_device(config), sizes_of(config)
    dtype = choose_dtype(config.target.dtype, device)
    target, hf = None, Qwen3Config.from_pretrained(config.target.path)
    if colocated:
        _with_weights(folder / "target", hf)
        target = load_target(config, device)
        vocabulary = target.vocabulary
    else:
        vocabulary = _ends(hf, dtype, device)
    with torch.device("meta"):
        drafter = Drafter(shape_of(config.drafter, hf)).to(choose_dtype(config.dtype, device))
    drafter = drafter.to_empty(device=device)
    fill(drafter)
    drafter.activation_checkpointing = config.activation_checkpointing
    models = Models(drafter=drafter, vocabulary=vocabulary, target=target)
    bench = Bench(
        config=config,
        sizes=sizes,
        models=models,
        optimizer=Optimizer(drafter, config.optimizer, config.steps),
        rows=made_rows(config, hf.vocab_size, documents=documents, rows=min(steps * config.data.rows_per_step, 32)),
    )
    if not colocated:
        bench.buffers = _buffers(config, hf, device)
    return bench


def fill(drafter: Drafter) -> None:
    """On its device, where a billion numbers take no time."""
    draw = torch.Generator(drafter.fc.weight.device).manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=draw)
            else:
                parameter.fill_(1.0)
        drafter.norm.weight.fill_(0.3)


def _with_weights(folder: Path, hf: Qwen3Config) -> None:
    if not any(folder.glob("*.safetensors")):
        (folder / "config.json").unlink()
        make_target(folder, hf.num_hidden_layers, SHAPE if hf.hidden_size == SHAPE["hidden_size"] else TOY)


def _ends(hf: Qwen3Config, dtype: torch.dtype, device: torch.device) -> Vocabulary:
    draw = torch.Generator(device).manual_seed(0)

    def matrix() -> Tensor:
        made = torch.empty(hf.vocab_size, hf.hidden_size, dtype=dtype, device=device)
        return made.normal_(0.0, 0.02, generator=draw)

    norm = torch.ones(hf.hidden_size, dtype=dtype, device=device)
    return Vocabulary(embedding=matrix(), head=matrix(), final_norm=norm, config=hf)


def _buffers(config: Config, hf: Qwen3Config, device: torch.device) -> list[Said]:
    """Two, as a rank of `split` has them: one in use, one that is being filled."""
    parcel = parcel_of(config, hf, device)
    made = [parcel.empty(device) for _ in range(2)]
    for buffer in made:
        buffer.normal_(generator=torch.Generator(device).manual_seed(2))
    return [parcel.split(buffer) for buffer in made]


def made_rows(config: Config, vocabulary: int, *, documents: int, rows: int) -> Rows:
    """Rows that are full, or as full as whole documents of this length make them; all tokens bear loss."""
    draw, length = np.random.default_rng(0), config.data.row_length
    size = min(documents, length)
    whole, rest = divmod(length, size)
    sizes = ([size] * whole + ([rest] if rest else [])) * rows
    made = [Document(tokens=draw.integers(2, vocabulary, n), generated=np.ones(n, bool)) for n in sizes]
    return pack(made, length, padding=config.drafter.mask_token)


def measure(bench: Bench, *, steps: int, after: int) -> Measured:
    """Of `steps` steps after `after`; on a GPU the peak is that of the measured ones."""
    cuda = bench.device.type == "cuda"
    times, spans, losses = [], [], []
    began = 0.0
    for number, batches in enumerate(bench.batches(after + steps)):
        if number == after and cuda:
            torch.cuda.reset_peak_memory_stats(bench.device)
        if number == after:
            began = time.perf_counter()
        took, loss = bench.step(batches)
        losses.append(loss)
        if number >= after:
            now = time.perf_counter()
            times.append(now - began)
            spans.append(took)
            began = now
    free = torch.cuda.mem_get_info(bench.device) if cuda else (0, 0)
    reserved = torch.cuda.max_memory_reserved(bench.device) if cuda else 0
    return Measured(
        seconds=statistics.median(times),
        spans={name: statistics.median(each[name] for each in spans) for name in spans[0]},
        first_loss=losses[0],
        peak=torch.cuda.max_memory_allocated(bench.device) if cuda else 0,
        reserved=reserved,
        outside=free[1] - free[0] - torch.cuda.memory_reserved(bench.device) if cuda else 0,
    )


def forget() -> None:
    """Gives back what the last one held, once nothing names it any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
