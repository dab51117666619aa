"""Peak memory of training steps beside what `trainer plan` says beforehand, at several shapes, on one GPU.

    python -m benchmarks.trainer_memory [--only NAME ...] [--json FILE]

Each shape takes a few steps on features that are in the buffer already (see trainer_step.py); two of the shapes are
near the end of a card of 139 GiB. Printed: the planned and the measured peak of memory in use, by how much they differ,
what torch's allocator had reserved, and what else of the card was taken, which `trainer plan` has an allowance for.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.step_parts import build, configure, forget, measure
from benchmarks.trainer_step import planned_peak

SHAPES = {
    "production": [],
    "blocks of 16": ["drafter.block_size=16"],
    "four rows, checkpointed, Muon": ["data.rows_per_step=4", "activation_checkpointing=true", "optimizer.kind=muon"],
    "two parts of two rows, distilled": ["data.rows_per_step=4", "data.micro_batches=2", "loss.kl=1"],
    "three rows of 1216 anchors": ["data.rows_per_step=3", "loss.anchors_per_row=1216"],
    "nine rows, checkpointed": ["data.rows_per_step=9", "activation_checkpointing=true"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(SHAPES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda:
        print("no GPU here: a toy size runs, of whose memory nothing is measured")
    results = {}
    for name in options.only or SHAPES:
        results[name] = one(name, SHAPES[name], options.steps, cuda=cuda)
        forget()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    return 0


def one(name: str, settings: list[str], steps: int, *, cuda: bool) -> dict:
    began = time.perf_counter()
    torch._dynamo.reset()  # each shape's kernels are its own, as in a process of its own
    if not cuda:
        settings = [each.replace("anchors_per_row=1216", "anchors_per_row=20") for each in settings]
    with tempfile.TemporaryDirectory() as folder:
        config = configure(Path(folder), "production" if cuda else "toy", settings)
        bench = build(Path(folder), config, documents=2000 if cuda else 80, steps=steps + 1)
        planned = planned_peak(bench, colocated=False)
        try:
            found = measure(bench, steps=steps, after=1)
        except torch.OutOfMemoryError as error:
            print(f"{name}: planned {planned / 2**30:.2f} GiB, and out of memory: {str(error).splitlines()[0]}")
            return {"planned": planned, "peak": None}
    result = {"planned": planned, "peak": found.peak, "reserved": found.reserved, "outside": found.outside}
    measured = "nothing measured"
    if found.peak:
        measured = (
            f"measured {found.peak / 2**30:.2f} ({planned / found.peak - 1:+.1%}), reserved "
            f"{found.reserved / 2**30:.2f}, outside the allocator {found.outside / 2**30:.2f}"
        )
    print(
        f"{name}: planned {planned / 2**30:.2f} GiB, {measured}; step {found.seconds:.2f} s, "
        f"{time.perf_counter() - began:.0f} s in all",
        flush=True,
    )
    return {**result, "seconds": found.seconds}


if __name__ == "__main__":
    sys.exit(main())
