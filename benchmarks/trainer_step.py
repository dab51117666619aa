"""One training step at the production shape, by its spans, beside the same step in plain torch, and the floor.

    python -m benchmarks.trainer_step [--mode buffer|colocated|long-document] [--steps 50] [--after 10] [--profile FILE]

Measured as a rank of `split` does it: features are in the buffer that the transport fills, the target is elsewhere
(`--mode colocated`: it is here, with the shape of Qwen3-8B and random weights, and runs in each step). Batches, copies
to the device, clipping, metrics and the update are part of a step. `long-document` has one document a row. Figures are
medians of --steps steps after --after others. Without a GPU a toy size runs, with dense attention, to try all of this.

The floor is the arithmetic of a step at the rate that this device has for one large product of matrices in bfloat16,
plus the bytes that the update cannot but move at the rate of a large copy.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain_step import PlainStep, measure_plain
from benchmarks.step_parts import Bench, Measured, build, configure, forget, measure
from trainer import plan_fit, warmup
from trainer.config import ConfigError
from trainer.plan_work import work

SPANS = ("forward", "loss", "backward")  # of the arithmetic that is the drafter's
KERNELS = (  # by what a kernel's name has in it, the first that matches
    ("flex attention", ("flex_attention",)),
    ("products of matrices", ("gemm", "nvjet", "cutlass", "xmma", "cublas")),
    ("norms", ("layer_norm", "rms", "LayerNorm")),
    ("the update", ("multi_tensor", "adam")),
    ("compiled arithmetic", ("triton",)),
    ("gathers and scatters", ("index", "scatter", "gather", "sort", "embedding")),
    ("joins and copies", ("cat", "copy", "Memcpy", "Memset", "fill")),
    ("reductions", ("reduce",)),
    ("pointwise", ("elementwise",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("buffer", "colocated", "long-document"), default="buffer")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--after", type=int, default=10, help="steps that are not measured")
    parser.add_argument("--documents", type=int, default=0, help="tokens of a document (default 2000; a toy: 80)")
    parser.add_argument("--size", choices=("production", "toy"), help="default: by whether there is a GPU")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--no-plain", action="store_true", help="without the step in plain torch")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write one step's kernels there, as text")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, help="kept, with the target's weights (default: a temporary one)")
    options = parser.parse_args()
    size = options.size or ("production" if torch.cuda.is_available() else "toy")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        try:
            config = configure(folder, size, options.overrides)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        result = run(folder, config, options, size)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


def run(folder: Path, config: Any, options: argparse.Namespace, size: str) -> dict[str, Any]:
    colocated = options.mode == "colocated"
    documents = options.documents or (80 if size == "toy" else 2000)
    documents = config.data.row_length if options.mode == "long-document" else documents
    steps = options.steps + options.after
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}; {options.mode}, documents of {documents:,} tokens", flush=True)
    floor = device_rates()
    forget()
    plain = None
    if not options.no_plain and config.data.rows_per_step == 1:
        began = time.perf_counter()
        other = PlainStep(build(folder, config, documents=documents, steps=steps))
        plain = measure_plain(other, steps=options.steps, after=options.after)
        del other
        forget()
        print(f"plain torch: measured in {time.perf_counter() - began:.0f} s, compiling included", flush=True)
    bench = build(folder, config, documents=documents, steps=steps, colocated=colocated)
    # compiles all there is; then compiling is an error, as in a run
    losses = [bench.step(batches)[1] for batches in bench.batches(2)]
    if bench.device.type == "cuda":
        warmup.seal()
    ours = dataclasses.replace(measure(bench, steps=options.steps, after=options.after), first_loss=losses[0])
    flops = work(bench.sizes, documents=documents, checkpointing=config.activation_checkpointing)
    flops = {span: count * config.data.micro_batches for span, count in flops.items()}
    planned = planned_peak(bench, colocated=colocated)
    told = {
        "device": device,
        "torch": torch.__version__,
        "mode": options.mode,
        "documents": documents,
        "flops": flops,
        "floor": floor and {**floor, "seconds": floor_of(bench, flops, floor, colocated=colocated)},
        "planned_peak": planned,
        "trainer": dataclasses.asdict(ours),
        "plain": dataclasses.asdict(plain) if plain else None,
    }
    show(told, ours, plain)
    if bench.device.type == "cuda":
        told["waits"] = waits(bench)
        print(f"waits of the host for the device in a step: {len(told['waits'])}" + "".join(told["waits"]))
    if options.profile:
        profile(bench, options.profile)
    return told


def planned_peak(bench: Bench, *, colocated: bool) -> int:
    """What `trainer plan` says of the same configuration."""
    topology = dataclasses.replace(bench.config.topology, mode="colocated" if colocated else "split")
    return plan_fit.drafter_memory(dataclasses.replace(bench.config, topology=topology), ranks=1).peak


def device_rates() -> dict[str, float] | None:
    """FLOPs a second of one product of matrices, bytes a second of one copy (read and written); None on a CPU."""
    if not torch.cuda.is_available():
        return None
    first = torch.randn(32768, 4096, dtype=torch.bfloat16, device="cuda")
    second = torch.randn(4096, 12288, dtype=torch.bfloat16, device="cuda")
    out = first @ second
    product = _seconds(partial(torch.mm, first, second, out=out))
    copy = _seconds(partial(torch.add, out, 1.0, out=out))
    return {"flops": 2 * 32768 * 4096 * 12288 / product, "bytes": 2 * out.nbytes / copy}


def _seconds(work_: Any) -> float:
    for _ in range(5):
        work_()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(20):
        work_()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 20 / 1e3


def floor_of(bench: Bench, flops: dict[str, float], rates: dict[str, float], *, colocated: bool) -> float:
    """Seconds. The update reads and writes master and two moments, and reads the gradient, in float32, and writes the
    weight: 30 bytes a parameter."""
    spans = (*SPANS, "target") if colocated else SPANS
    return sum(flops[span] for span in spans) / rates["flops"] + 30 * bench.sizes.drafter / rates["bytes"]


def show(told: dict[str, Any], ours: Measured, plain: Measured | None) -> None:
    flops, both = told["flops"], [("trainer", ours)] + ([("plain torch", plain)] if plain else [])
    useful = sum(flops[span] for span in SPANS)
    for name, measured in both:
        spans = "  ".join(f"{span} {1e3 * seconds:.1f}" for span, seconds in measured.spans.items())
        whole = useful + (flops["target"] if name == "trainer" and told["mode"] == "colocated" else 0)
        memory = f", peak {measured.peak / 2**30:.2f} GiB" if measured.peak else ""
        print(f"{name}: step {1e3 * measured.seconds:.1f} ms, {whole / measured.seconds / 1e12:.4g} TFLOP/s{memory}")
        print(f"  ms: {spans}")
        rates = "  ".join(
            f"{span} {flops[span] / measured.spans[span] / 1e12:.4g}" for span in SPANS if span in measured.spans
        )
        print(f"  TFLOP/s: {rates}; loss of the first step {measured.first_loss:.5f}")
    print(f"a step has {useful / 1e12:.4g} TFLOP ({', '.join(f'{span} {flops[span] / 1e12:.4g}' for span in SPANS)})")
    if told["floor"]:
        floor = told["floor"]
        print(
            f"floor {1e3 * floor['seconds']:.0f} ms, at {floor['flops'] / 1e12:.0f} TFLOP/s of one product and "
            f"{floor['bytes'] / 1e12:.2f} TB/s"
        )
    if ours.peak:
        print(
            f"memory: peak {ours.peak / 2**30:.2f} GiB, planned {told['planned_peak'] / 2**30:.2f} "
            f"({told['planned_peak'] / ours.peak - 1:+.1%}); reserved {ours.reserved / 2**30:.2f}, outside torch's "
            f"allocator {ours.outside / 2**30:.2f}"
        )


def waits(bench: Bench) -> list[str]:
    """Where the host waits for the device before the metrics are read; lines with file and place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for batches in bench.batches(1):
                bench.step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"\n  {Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]


def profile(bench: Bench, path: Path) -> None:
    """One step's kernels: grouped, and each by name, by the time that they take on the device."""
    from torch.profiler import ProfilerActivity

    cuda = bench.device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(activities=kinds) as found:
        for batches in bench.batches(1):
            bench.step(batches)
        if cuda:
            torch.cuda.synchronize()
    averages = found.key_averages()
    lines = []
    if cuda:
        kernels = [each for each in averages if each.device_type == torch.autograd.DeviceType.CUDA]
        groups: dict[str, tuple[float, int]] = {}
        for each in kernels:
            key = each.key.lower()
            group = next((name for name, words in KERNELS if any(word.lower() in key for word in words)), "others")
            took, count = groups.get(group, (0.0, 0))
            groups[group] = took + each.self_device_time_total / 1e3, count + each.count
        for name, (took, count) in sorted(groups.items(), key=lambda pair: -pair[1][0]):
            lines.append(f"{took:9.2f} ms  {count:6d} kernels  {name}")
        lines.append(f"{sum(took for took, _ in groups.values()):9.2f} ms in all\n")
    sort = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    lines.append(averages.table(sort_by=sort, row_limit=80, max_name_column_width=110))
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:-1]) or f"profile of one step in {path}")


if __name__ == "__main__":
    sys.exit(main())
