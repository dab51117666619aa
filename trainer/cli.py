"""`python -m trainer train | evaluate | export | warmup | plan`; `python -m trainer --help` tells the rest.

Nothing here imports torch until a configuration has been read, so help and configuration errors come at once.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

from trainer import faults, launch
from trainer.config import Config, ConfigError, load
from trainer.errors import TrainerError
from trainer.watchdog import Watchdog

USAGE_ERROR = 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m trainer", description="Train, evaluate and export DFlash drafters.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a drafter, resuming from the run's last checkpoint")
    evaluate = commands.add_parser("evaluate", help="measure a drafter by real speculative decoding")
    export = commands.add_parser(
        "export", help="write a checkpoint as serving engines read it, and prove it drafts alike"
    )
    warmup = commands.add_parser("warmup", help="compile everything that a run will use, and train nothing")
    plan = commands.add_parser("plan", help="say what a run takes (memory, time, disk) and whether it fits the GPU")
    for command in (train, evaluate, export, warmup, plan):
        command.add_argument("config", type=Path, metavar="CONFIG.yaml")
        command.add_argument("--seed", type=int, help="use this seed in place of the file's")
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            dest="overrides",
            help="change one setting, such as optimizer.muon_rate=0.02; may be given more than once",
        )
    which = evaluate.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint directory of a run")
    which.add_argument("--drafter", type=Path, metavar="DIR", help="an exported drafter, in either layout")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    export.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint directory of a run")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="the directory to write; it must be new")
    export.add_argument(
        "--layout", choices=("zlab", "speculators"), default="zlab", help="whose layout (default: zlab)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace what is at --to")
    plan.add_argument("--gpu", default="", metavar="NAME", help="plan for this kind of GPU (default: the one here)")
    plan.add_argument("--gpu-memory", type=_gib, metavar="GIB", help="plan for a GPU of so much memory")
    plan.add_argument("--documents", type=_positive, metavar="TOKENS", help="length of documents (default: a row's)")
    plan.add_argument("--choose", action="store_true", help="choose chunk, micro-batches and checkpointing that fit")
    plan.add_argument("--json", action="store_true", help="all of it as JSON")
    top.epilog = "ORCH_RUN_DIR (default runs/<name>) is where a run's files go, ORCH_METRICS its metrics file."
    return top


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text}")
    return int(text)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number of GiB above 0, such as 79.2, not {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    options = parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # data may hold half a character
    overrides = list(options.overrides)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    try:
        config = load(options.config, overrides)
        if options.command == "train" and not launch.under_torchrun():
            present = launch.ranks_present(config.whole_plan.world, dict(os.environ))
            if present:
                fewer = f"topology.present={present}"
                options.arguments = [*options.arguments, "--set", fewer]
                config = load(options.config, [*overrides, fewer])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        return run(options, config, began)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _must_be_writable(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainerError(f"{folder}: cannot be made ({error.strerror}); set ORCH_RUN_DIR to another") from None
        if not os.access(folder, os.W_OK):
            raise TrainerError(f"{folder}: may not be written to; set ORCH_RUN_DIR to another folder")


def _warm_up(options: argparse.Namespace, config: Config, run_dir: Path) -> int:
    from trainer import kinds
    from trainer.models import choose_device
    from trainer.warming import warm_all

    faults.register()
    told = os.environ.get("ORCH_METRICS")
    _must_be_writable(run_dir, *([Path(told).parent] if told else []))
    if len(kinds.cards_of(names := kinds.names_here(config))) > 1:
        return kinds.warm_each(names, [sys.executable, "-m", "trainer", *options.arguments])
    metrics_path = Path(told) if told else None
    return warm_all(config, choose_device(config), run_dir, metrics_path=metrics_path)


def run(options: argparse.Namespace, config: Config, began: float) -> int:
    # Waiting threads spin, by default for so long that on a busy machine they stop each other and a step takes ten
    # times as long; asleep at once, they wake too late. OpenMP reads this when torch is imported, which takes
    # seconds; hence here and not at the top.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if options.command == "plan":
        from trainer import plan

        asked = plan.Asked(
            gpu=options.gpu,
            memory=options.gpu_memory,
            documents=options.documents,
            choose=options.choose,
            overrides=tuple(options.overrides),
        )
        return plan.show(config, asked, as_json=options.json, config_path=options.config)
    run_dir = Path(os.environ.get("ORCH_RUN_DIR") or Path("runs") / config.name)
    if options.command == "train":
        metrics_path = Path(os.environ.get("ORCH_METRICS") or run_dir / "metrics.jsonl")
        faults.register()
        _must_be_writable(run_dir, metrics_path.parent)
        if not launch.under_torchrun():
            print(f"train {config.name}: seed {config.seed}, {config.steps} steps, files in {run_dir}")
            if config.topology.present:
                print(f"on {config.plan.world} of {config.whole_plan.world} ranks, {config.plan.told}")
            if config.plan.world > 1:
                launch.become_torchrun(config.plan, options.arguments)
        watchdog = Watchdog.of_this_rank() if config.plan.world > 1 else None
        from trainer.loop import train

        return train(config, run_dir=run_dir, metrics_path=metrics_path, began=began, watchdog=watchdog)
    if options.command == "warmup":
        return _warm_up(options, config, run_dir)
    if options.command == "evaluate":
        from trainer.evaluate import evaluate_checkpoint

        return evaluate_checkpoint(config, checkpoint=options.checkpoint, drafter=options.drafter, json=options.json)
    from trainer.export import export_checkpoint

    return export_checkpoint(
        config, checkpoint=options.checkpoint, to=options.to, layout=options.layout, overwrite=options.overwrite
    )
