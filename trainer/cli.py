"""`python -m trainer train CONFIG.yaml` and `python -m trainer evaluate CONFIG.yaml --checkpoint DIR`.

Nothing here imports torch until a configuration has been read, so help and configuration errors come at once.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from trainer.config import Config, ConfigError, load
from trainer.errors import TrainerError

USAGE_ERROR = 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m trainer", description="Train and evaluate DFlash drafters.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a drafter, resuming from the run's last checkpoint")
    evaluate = commands.add_parser("evaluate", help="measure a checkpoint by real speculative decoding")
    for command in (train, evaluate):
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
    evaluate.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint directory")
    top.epilog = "ORCH_RUN_DIR (default runs/<name>) is where a run's files go, ORCH_METRICS its metrics file."
    return top


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    options = parser().parse_args(arguments)
    sys.stdout.reconfigure(line_buffering=True)
    overrides = list(options.overrides)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    try:
        config = load(options.config, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    run_dir = Path(os.environ.get("ORCH_RUN_DIR") or Path("runs") / config.name)
    metrics_path = Path(os.environ.get("ORCH_METRICS") or run_dir / "metrics.jsonl")
    print(f"{options.command} {config.name}: seed {config.seed}, {config.steps} steps, files in {run_dir}")
    try:
        return run(options, config, run_dir, metrics_path, began)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace, config: Config, run_dir: Path, metrics_path: Path, began: float) -> int:
    # Waiting threads spin, by default for so long that on a busy machine they stop each other and a step takes ten
    # times as long; asleep at once, they wake too late. OpenMP reads this when torch is imported, which takes
    # seconds; hence here and not at the top.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if options.command == "train":
        from trainer.loop import train

        return train(config, run_dir=run_dir, metrics_path=metrics_path, began=began)
    from trainer.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(config, options.checkpoint)
