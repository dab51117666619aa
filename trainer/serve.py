"""What a target rank does: it makes the batches of its turn, hands them out, and measures drafters when asked."""

import time
from pathlib import Path

import torch

from trainer import warming, warmup
from trainer.assess import Assessor
from trainer.config import Config
from trainer.feed import load_rows, parcel_of, rows_of_batch
from trainer.models import load_target
from trainer.pipeline import Sender
from trainer.world import World


def serve(config: Config, world: World, *, run_dir: Path, metrics_path: Path) -> int:
    target = load_target(config, world.device)
    parcel = parcel_of(config, target.config, world.device)
    rows, documents = load_rows(config, target.config.vocab_size, speak=False)
    report = warming.report_of(world, metrics_path)
    warmed = warming.warm_target(config, world, target, run_dir, report)
    report.done()
    if world.device.type == "cuda":
        warmup.seal()
    world.barrier()
    warming.tidy(run_dir)
    sender = Sender(world, parcel)
    assessor = Assessor(world, target, [v.config for v in config.variants] or [config], documents)
    plan, draws = config.plan, config.data.anchor_draws
    first = int(world.published("first")) // draws  # data step
    last = -(-config.steps // draws) * plan.parts
    print(
        f"target {world.role.index}: {warmed.line()}; sends {parcel.bytes / 1e6:.2f} MB a batch from two buffers",
        flush=True,
    )

    def make(batch: int, buffer: torch.Tensor) -> None:
        taken = rows_of_batch(config, rows, batch)
        hidden, features = parcel.split(buffer)
        tokens, start = taken.tokens.to(world.device), taken.start.to(world.device)
        last_states, _ = target.inspect(tokens, start, last=hidden is not None, into=features)
        if hidden is not None:
            hidden.copy_(last_states)
        waits = sender.waits
        world.publish(f"waits/{world.role.index}", [waits.busy, waits.waiting, waits.batches])

    began = time.perf_counter()
    sender.run(plan.made_by(world.role.index, first * plan.parts, last), make, assessor.serve)
    print(f"target {world.role.index}: done after {time.perf_counter() - began:.0f} s", flush=True)
    return 0
