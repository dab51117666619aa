"""How often a job of several ranks that compile comes to its steps: launches with an empty compile cache, and with a
filled one.

    python -m benchmarks.launches [--tries 30] [--json FILE] [--config CONFIG.yaml] [--set KEY=VALUE …]

Each launch is `trainer train` as a user starts it, under torchrun, to step 10. By default it is the demo's target and
drafter as one target rank and two drafter ranks on the CPU, with the head's arithmetic compiled (`compile: on`; needs
g++). A cold launch has a cache folder of its own, which is empty; warm ones share one that a launch before has filled.
A launch counts as `ok` if it ends well, with every step, and each drafter's warm-up compiled in a cold launch and
found the kernels in a warm one. With `--strict` it exits with 1 unless all are ok.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 10
DEMO = ROOT / "trainer" / "configs" / "demo.yaml"
SMALL = (
    "topology.mode=split", "topology.targets=1", "topology.drafters=2", "compile=on", "threads=1",
    "loss.anchors_per_row=8", "loss.chunk=64", "evaluate.prompts=null", "evaluate.every=0",
)  # fmt: skip
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
WARM_UP = re.compile(r"warm-up: .*compile cache: (\d+) hits, (\d+) misses")


@dataclass(frozen=True)
class Launch:
    outcome: str  # ok, or what went wrong
    seconds: float
    warm_up: str  # what the drafters' leader said of it


def launch(folder: Path, cache: Path, arguments: list[str], *, cold: bool, limit: float) -> Launch:
    """One launch in `folder`, which is new; what it says is in `folder`/log."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "ORCH_METRICS"}
    environment |= {name: str(cache / name.lower()) for name in CACHES} | {"ORCH_RUN_DIR": str(folder / "run")}
    words = [sys.executable, "-m", "trainer", "train", *arguments, "--set", f"steps={STEPS}"]
    began = time.monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()  # the launcher; its ranks end with it
            process.wait()
            code = None
    seconds = time.monotonic() - began
    said = (folder / "log").read_text(errors="replace")
    found = WARM_UP.search(said)
    return Launch(_outcome(code, folder / "run", found, cold=cold), seconds, found[0] if found else "")


def _outcome(code: int | None, run: Path, warm_up: re.Match[str] | None, *, cold: bool) -> str:
    if code is None:
        return "hang"
    if code:
        return f"exit {code}"
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in told if "step" in line]
    if max(steps, default=0) < STEPS:
        return f"only {max(steps, default=0)} steps"
    hits, misses = map(int, warm_up.groups()) if warm_up else (0, 0)
    if cold and not misses + hits:  # the leader may load what the other drafter rank has compiled
        return "nothing compiled"
    return "not from the cache" if not cold and (misses or not hits) else "ok"


def table(launches: dict[str, list[Launch]]) -> str:
    lines = [f"{'cache':<8}{'launches':>9}{'ok':>5}{'failed':>8}{'median':>9}{'slowest':>9}  what failed"]
    for kind, tries in launches.items():
        failed = [each.outcome for each in tries if each.outcome != "ok"]
        seconds = [each.seconds for each in tries] or [float("nan")]
        lines.append(
            f"{kind:<8}{len(tries):>9}{len(tries) - len(failed):>5}{len(failed):>8}"
            f"{statistics.median(seconds):>8.1f}s{max(seconds):>8.1f}s  {', '.join(sorted(set(failed)))}".rstrip()
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches", description="Do cold and warm launches of several ranks come to step 10?"
    )
    parser.add_argument("--tries", type=int, default=30, help="launches of each kind (default: 30)")
    parser.add_argument("--config", type=Path, help="in place of the demo, split and compiled on the CPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a launch hangs (default: 300)")
    parser.add_argument("--json", type=Path, help="write every launch there")
    parser.add_argument("--logs", type=Path, help="keep what the launches wrote in this new directory")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless all are ok")
    options = parser.parse_args(arguments)
    sets = [*(() if options.config else SMALL), *options.overrides]
    words = [str(options.config or DEMO), *(word for each in sets for word in ("--set", each))]
    launches: dict[str, list[Launch]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        cache = folder
        for kind, tries in launches.items():
            for number in range(options.tries):
                if kind == "cold":  # the last one's is what the warm ones find
                    cache = folder / f"cache-{number}"
                tries.append(
                    launch(folder / f"{kind}-{number}", cache, words, cold=kind == "cold", limit=options.limit)
                )
                print(f"{kind} {number + 1}: {tries[-1].outcome}, {tries[-1].seconds:.1f} s", flush=True)
    print(table(launches))
    if options.json:
        options.json.write_text(json.dumps({kind: [asdict(t) for t in ts] for kind, ts in launches.items()}, indent=1))
    return int(options.strict and any(each.outcome != "ok" for tries in launches.values() for each in tries))


if __name__ == "__main__":
    sys.exit(main())
