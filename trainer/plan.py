"""`python -m trainer plan CONFIG`: what a run takes, before it is started: parameters, arithmetic, seconds, memory,
traffic and disk. Pure functions of the configuration and the target's config.json, without torch; only `this_card` asks
the machine, for its GPU.

What is not known is None, in the text "unknown", with the reason; nothing is estimated from another card.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import plan_fit
from trainer.config import Config
from trainer.plan_memory import target_rank
from trainer.plan_sizes import Sizes, sizes_of
from trainer.plan_work import SPANS, Card, Rates, card_named, seconds, work

VERSION = 1  # of the JSON's shape
GIB = 1 << 30
DOES_NOT_FIT = 1


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says beside the configuration."""

    gpu: str = ""  # empty: this machine's, where it has one
    memory: float | None = None  # GiB of the card
    documents: int | None = None  # tokens of a document; None: as long as a row, the most there can be
    choose: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def again(self) -> list[str]:
        """The words that ask for the same once more."""
        words = [word for each in self.overrides for word in ("--set", each)]
        words += ["--gpu", self.gpu] if self.gpu else []
        words += ["--gpu-memory", f"{self.memory:g}"] if self.memory is not None else []
        return words + (["--documents", str(self.documents)] if self.documents else [])


def plan(config: Config, asked: Asked, card: Card | None) -> dict[str, Any]:
    """Everything there is to say, as plain JSON. Bytes, seconds and FLOPs; raises TrainerError."""
    chosen = None
    memory = card.memory if card else None
    if asked.choose and memory:
        found = plan_fit.choose(config, memory)
        chosen = {"set": found[1] if found else None}
        config = found[0] if found else config
    drafters = [_drafter(each, ranks, asked, card) for each, ranks in plan_fit.drafters_of(config)]
    names = [variant.name for variant in config.variants] or ["drafter"]
    for name, drafter in zip(names, drafters, strict=True):
        drafter["name"] = name
    stream = plan_fit.stream_sizes(config)
    peak = max(drafter["memory"]["peak"] for drafter in drafters)
    target = _target(config, stream, asked, card)
    if target["memory"]:
        peak = max(peak, target["memory"]["peak"])
    step = _step(config, drafters, target)
    known = config.attention == "flex" and stream.target.numbers is not None
    fits = plan_fit.needed(peak) <= memory if memory and known else None
    return {
        "version": VERSION,
        "name": config.name,
        "flex": config.attention == "flex",
        "card": {"name": card.name or None, "memory": card.memory} if card else None,
        "rates": card.rates.source if card and card.rates else None,
        "documents": asked.documents or config.data.row_length,
        "drafters": drafters,
        "target": target,
        "step": step,
        "features": _features(config, stream, step),
        "peak": peak,
        "needed": plan_fit.needed(peak),
        "fits": fits,
        "chosen": chosen,
        "changes": [vars(change) for change in plan_fit.changes(config, memory)] if fits is False else [],
    }


def _drafter(config: Config, ranks: int, asked: Asked, card: Card | None) -> dict[str, Any]:
    sizes = sizes_of(config)
    memory = card.memory if card else None
    ledger = plan_fit.drafter_memory(config, ranks=ranks, memory=memory)
    documents = asked.documents or config.data.row_length
    flops = work(sizes, documents=documents, checkpointing=config.activation_checkpointing)
    parts = -(-config.plan.parts // ranks)
    own = {span: flops[span] * parts for span in SPANS if span != "target"}
    matrices = sizes.drafter - sizes.gains
    muon = config.optimizer.kind == "muon"
    states = matrices + 2 * sizes.gains if muon else 2 * sizes.drafter
    saved = sizes.drafter * (1 + bool(config.optimizer.ema)) + states
    return {
        "name": "",
        "parameters": sizes.drafter,
        "ranks": ranks,
        "sharded": plan_fit.shards_of(sizes, config, ranks, memory) > 1,
        "parts": parts,
        "head_rows": sizes.entries,
        "flops": own,
        "seconds": _seconds(sizes, own, card, muon=muon),
        "memory": {"peak": ledger.peak, "when": ledger.when, "by": {k: v for k, v in ledger.at_peak.items() if v}},
        "checkpoint": saved * sizes.wide,
    }


def _seconds(sizes: Sizes, own: dict[str, float], card: Card | None, *, muon: bool) -> dict[str, float | None]:
    """Of the parts of a step at one rank, by span; Muon's update has not been measured, nor have float32 products."""
    rates = _rates(sizes, card)
    if rates is None:
        return {**dict.fromkeys(own), "optimizer": None}
    spans: dict[str, float | None] = {span: flops / rates.flops[span] for span, flops in own.items()}
    return {**spans, "optimizer": None if muon else rates.update * sizes.drafter}


def _rates(sizes: Sizes, card: Card | None) -> Rates | None:
    return card.rates if card and sizes.bytes == sizes.target_bytes == 2 else None


def _target(config: Config, sizes: Sizes, asked: Asked, card: Card | None) -> dict[str, Any]:
    split = config.topology.mode == "split"
    flops = work(sizes, documents=asked.documents or config.data.row_length)["target"]
    memory = None
    if split and sizes.target.numbers is not None:
        ledger = target_rank(sizes)
        memory = {"peak": ledger.peak, "when": ledger.when, "by": {k: v for k, v in ledger.at_peak.items() if v}}
    rates = _rates(sizes, card)
    return {
        "model": sizes.target.model,
        "parameters": sizes.target.numbers,
        "layers_run": sizes.captured_to,
        "ranks": config.plan.targets if split else 0,
        "flops_a_part": flops,
        "seconds_a_part": seconds({**dict.fromkeys(SPANS, 0.0), "target": flops}, rates)["target"] if rates else None,
        "memory": memory,
    }


def _step(config: Config, drafters: list[dict[str, Any]], target: dict[str, Any]) -> dict[str, Any]:
    """Of the slowest drafter, and how target and drafter share the time: in `split` the target makes the next parts
    meanwhile."""
    eats = [_sum(drafter["seconds"].values()) for drafter in drafters]
    eat = max(eats) if None not in eats else None
    a_part, draws = target["seconds_a_part"], config.data.anchor_draws
    make = None if a_part is None else a_part * config.plan.parts / draws
    if config.topology.mode == "colocated":
        make = None if a_part is None else a_part * drafters[0]["parts"] / draws
        whole, how = _sum([eat, make]), "one after the other"
    else:
        make = None if make is None else make / config.plan.targets
        whole = None if eat is None or make is None else max(eat, make)
        how = "which is the slower" if whole is not None and whole == make else "which the drafter outlasts"
    tokens = config.data.rows_per_step * config.data.row_length
    return {
        "drafter_seconds": eat,
        "target_seconds": make,
        "seconds": whole,
        "how": how if whole is not None else None,
        "tokens": tokens,
        "run_seconds": None if whole is None else whole * config.steps,
    }


def _sum(values: Any) -> float | None:
    listed = list(values)
    return None if None in listed else sum(listed)


def _features(config: Config, sizes: Sizes, step: dict[str, Any]) -> dict[str, Any]:
    a_step = sizes.feature_bytes * config.plan.parts * len(config.plan.drafters)
    whole = step["seconds"]
    travels = config.topology.mode == "split"
    return {
        "part": sizes.feature_bytes,
        "travels": travels,
        "step": a_step if travels else 0,
        "second": a_step / config.data.anchor_draws / whole if travels and whole else None,
    }


def card_of(asked: Asked) -> Card | None:
    """The card that the plan is for: as asked, else this machine's first one; None where there is none to be known."""
    known = card_named(asked.gpu) if asked.gpu else None
    if asked.gpu or asked.memory is not None:
        memory = round(asked.memory * GIB) if asked.memory is not None else known.memory if known else 0
        name = known.name if known else asked.gpu
        return Card(name=name, memory=memory, rates=known.rates if known else None) if memory else None
    return this_card()


def this_card() -> Card | None:
    """By nvidia-smi, whose figure is a little above what CUDA tells."""
    if not (program := shutil.which("nvidia-smi")):
        return None
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
        name, mib = said.rsplit(",", 1)
        known = card_named(name.strip())
        memory = known.memory if known else int(mib) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return Card(name=name.strip(), memory=memory, rates=known.rates if known else None)


def show(config: Config, asked: Asked, *, as_json: bool, config_path: Path) -> int:
    """Prints the plan; -> the exit code, 1 where the card is known and too small. Raises TrainerError."""
    from trainer.plan_text import text

    found = plan(config, asked, card_of(asked))
    print(json.dumps(found, indent=1) if as_json else text(found, asked, config_path))
    return DOES_NOT_FIT if found["fits"] is False else 0
