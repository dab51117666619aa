"""What a rank warms: one micro-batch of the very shapes that it will use, made up."""

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from trainer import compile_report, launch, warmup
from trainer.compile_report import Report
from trainer.config import Config
from trainer.feed import made_up, parcel_of
from trainer.models import Models, build_without_target, load_target
from trainer.optimizer import Optimizer
from trainer.sharding import stand_in
from trainer.spans import Spans
from trainer.step import blocks_of, compute_gradient, objective_of
from trainer.target import Target
from trainer.warmup import Warmed
from trainer.world import World


def warm_target(config: Config, world: World, target: Target, run_dir: Path, report: Report) -> Warmed:
    """Compiles by checking that packed documents do not see each other, in rows of the run's length."""

    def work() -> None:
        target.check_isolation(config.data.row_length, rows=config.data.rows_per_step // config.plan.parts)

    return _warm(work, f"target on {kind_of(world.device)}", config, world, run_dir, report)


def warm_drafter(
    config: Config,
    world: World,
    models: Models,
    optimizer: Optimizer,
    run_dir: Path,
    report: Report,
    *,
    stream: Config,
) -> Warmed:
    """Forward and backward of one micro-batch, without an update; then the proof that its attention is not dense.

    `stream`: the run's configuration, of which `config` is this rank's variant.
    """
    parcel = parcel_of(stream, models.vocabulary.config, world.device)
    batch = made_up(config, rows=parcel.rows)

    def work() -> None:
        shape, place = (parcel.rows, parcel.length), {"dtype": parcel.dtype, "device": world.device}
        features = torch.randn(*shape, parcel.features, **place)
        last = torch.randn(*shape, parcel.hidden, **place) if objective_of(config).distils else None
        compute_gradient(config, models, optimizer, [batch], Spans(world.device), source=lambda _: (last, features))
        optimizer.clear()

    name = f"drafter {world.role.variant} on {kind_of(world.device)}"
    warmed = _warm(work, name, config, world, run_dir, report)
    if config.attention == "dense":
        return warmed
    blocks, shape = blocks_of(batch.to(world.device), config.drafter.block_size), models.drafter.shape
    with report.watch(), compile_report.graph("proof of attention", "forward"):
        evidence = {
            str(layer): warmup.prove_not_dense(
                blocks,
                layer,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                size=shape.head_size,
                dtype=models.drafter.dtype,
            )
            for layer in dict.fromkeys(models.drafter.kinds)
        }
    return replace(warmed, evidence=evidence)


def report_of(world: World, path: Path | None, say: Callable[[str], None] | None = None) -> Report:
    """Of what this rank compiles, into that metrics file."""
    return Report(path=path, rank=world.role.rank, alone=world.alone, say=say)


def _warm(work: Callable[[], None], name: str, config: Config, world: World, run_dir: Path, report: Report) -> Warmed:
    who = f"rank {world.role.rank} ({world.role.kind} {world.role.index})"
    timeout = config.topology.timeout
    return warmup.warm(work, folder=_folder(run_dir), name=name, who=who, timeout=timeout, report=report)


def kind_of(device: torch.device) -> str:
    """Of GPU: kernels of one kind serve every card of it."""
    return torch.cuda.get_device_name(device).replace("/", " ") if device.type == "cuda" else "cpu"


def _folder(run_dir: Path) -> Path:
    """One for each attempt, the ranks of which have one launcher: what became of an earlier one is of no interest."""
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    born = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()[19]  # proc(5): start time
    return run_dir / "warm" / f"{launcher}-{born}"


def tidy(run_dir: Path) -> None:
    """When all ranks are warm, one at each machine removes what they told each other by."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(_folder(run_dir), ignore_errors=True)
        with contextlib.suppress(OSError):  # an earlier attempt that was killed has left its own
            (run_dir / "warm").rmdir()


def warm_all(config: Config, device: torch.device, run_dir: Path, *, metrics_path: Path | None = None) -> int:
    """`trainer warmup`: all that any rank of this kind of GPU will compile, one after the other; -> the exit code."""
    plan = config.plan
    # C++ is built for a number of threads, which is part of torch's key: as many as the run's ranks will have
    if threads := launch.threads_of_a_rank(config.threads, plan, dict(os.environ)):
        torch.set_num_threads(threads)
    world = World(topology=plan, role=plan.role(0), device=device, timeout=config.topology.timeout)
    report = Report(path=metrics_path, say=lambda text: print(f"  {text}"))
    print(f"compiling for {kind_of(device)} into {' and '.join(map(str, compile_report.folders()))}")
    try:
        _warm_each(config, world, run_dir, report)
    except Exception:
        for name in report.failed:
            print(f"  {name}: failed")
        raise
    warmup.seal()
    tidy(run_dir)
    report.done()
    print(report.line())
    return 0


def _warm_each(config: Config, world: World, run_dir: Path, report: Report) -> None:
    """The target, and then each drafter: no two of them are ever in memory together."""
    device = world.device
    target = load_target(config, device)
    warmed = warm_target(config, world, target, run_dir, report)
    print(f"target: {warmed.line()}")
    del target
    for number, each in enumerate([variant.config for variant in config.variants] or [config]):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        models = build_without_target(each, device)
        if config.plan.drafters[number] > 1 and each.topology.shard != "off":  # whole it might not fit
            models = replace(models, drafter=stand_in(models.drafter, device))
        optimizer = Optimizer(models.drafter, each.optimizer, each.steps)
        own = replace(world, role=replace(world.role, variant=number))
        warmed = warm_drafter(each, own, models, optimizer, run_dir, report, stream=config)
        print(f"{config.variants[number].name if config.variants else 'drafter'}: {warmed.line()}")
        for layer, found in warmed.evidence.items():
            print(f"  {layer}: {evidence_line(found)}")
        del models, optimizer


def evidence_line(found: dict) -> str:
    return (
        f"attention took {found['peak_bytes'] / 2**20:.0f} MiB where dense attention takes "
        f"{found['dense_bytes'] / 2**30:.2f} GiB a copy; kernels {', '.join(found['kernels'])}"
    )
