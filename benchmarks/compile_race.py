"""How often threads that compile at once break torch, and whether trainer.compile_guard keeps them from it.

    python -m benchmarks.compile_race [--device cuda] [--tries 3] [--seconds 2] [--budget 380] [--json FILE]

Layouts: `one` (threads sharing a GPU, or the CPU), `several` (threads on a GPU each, where there are two), and
`processes` (one worker each, one cache folder). Scenarios: `cold` first calls, `warm` calls beside a thread that
compiles, beside bare `traces`, plain `modules` beside traces, and new `lengths`. On a GPU each call is forward and
backward, on the CPU forward alone, since flex attention has no other there.

Each try is a fresh process that ends after `--limit` seconds at the latest; one that hangs leaves its stacks in
`--stacks`. Tries go round all cells, so that a budget that ends early has tried each about as often. A try counts under
the worst that it met: dense, deadlock, hang, poisoned, FX error, module, other, ok.

It measures and asserts nothing, save `--strict`: exit 1 unless every guarded try and every process is ok.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCENARIOS = ("cold", "warm", "traces", "modules", "lengths")
IN_PROCESSES = ("cold", "lengths")  # the others need a second thread
OUTCOMES = ("ok", "FX error", "module", "poisoned", "deadlock", "hang", "dense", "other")
_COMPILES_BACKWARD = ("compile_fx_backward", "bw_compiler", "_backward_impl")
_COMPILES = ("create_fw_bw_graph", "create_joint", "aot_dispatch_autograd_graph", "aot_create_joint_with_descriptors",
             "_convert_frame_assert", "compile_inner", "transform_code_object", "dispatch_trace")  # fmt: skip
_WORST_FIRST = ("dense", "deadlock", "hang", "poisoned", "FX error", "module", "other")


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    layout: str
    scenario: str
    guarded: bool

    def __str__(self) -> str:
        return f"{self.layout:<10}{self.scenario:<9}{'guard' if self.guarded else '-':<6}"


@dataclass
class Row:
    """What came of a cell's tries."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    calls: int = 0
    failed: int = 0
    messages: collections.Counter[str] = field(default_factory=collections.Counter)
    stacks: list[str] = field(default_factory=list)


def outcome(found: dict[str, Any]) -> str:
    """The worst of what a try met."""
    met = set()
    errors = " ".join(found["errors"])
    if found["dense"] or "DenseAttentionError" in errors:
        met.add("dense")
    if found["left"] or "PoisonedError" in errors or "CURRENT_PATCHER is None" in errors:
        met.add("poisoned")
    if "using FX to symbolically trace" in errors:
        met.add("FX error")
    if "not installed as a submodule" in errors:
        met.add("module")
    if found["errors"] and not met:
        met.add("other")
    return next((one for one in _WORST_FIRST if one in met), "ok")


def hanging(stacks: str) -> str:
    """ "deadlock" where the stacks show the pair: a backward pass that waits to be compiled in a thread of the autograd
    engine, and a thread that compiles and waits for that engine; else "hang"."""
    threads = [part for part in stacks.split("\n\n") if "Thread 0x" in part]
    backward = [one for one in threads if _in(one, _COMPILES_BACKWARD) and not _in(one, ("_engine_run_backward",))]
    waiting = [one for one in threads if _in(one, ("_engine_run_backward",)) and _in(one, _COMPILES)]
    return "deadlock" if backward and waiting else "hang"


def _in(stack: str, functions: Sequence[str]) -> bool:
    """Whether one of the functions is on the stack, as faulthandler writes it."""
    return any(re.search(rf" in {re.escape(name)}$", stack, re.M) for name in functions)


class Bench:
    """All tries, a few at once."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.rows: dict[Cell, Row] = collections.defaultdict(Row)
        self.torch = ""

    def attempt(self, cell: Cell, number: int) -> None:
        """One try of a cell; in `processes`, one process a worker on one cache folder."""
        alone = cell.layout == "processes"
        name = f"{cell.layout}-{cell.scenario}-{'guard' if cell.guarded else 'bare'}-{number}"
        cache = self.folder / (name if cell.scenario == "cold" else "cache")
        parts = [f"{name}-{part}" for part in range(self.options.threads if alone else 1)]
        with ThreadPoolExecutor(len(parts)) as pool:
            results = list(pool.map(lambda part: self._process(cell, part, cache, 1 if alone else None), parts))
        row = self.rows[cell]
        worst = [result[0] for result in results]
        row.outcomes[next((one for one in _WORST_FIRST if one in worst), "ok")] += 1
        for _, found, text in results:
            row.messages.update({text: 1} if text else {})
            if found is not None:
                self.torch = found["torch"]
                row.calls += sum(found["calls"].values())
                row.failed += sum(found["errors"].values())
                row.messages.update(found["errors"])

    def _process(
        self, cell: Cell, name: str, cache: Path, threads: int | None
    ) -> tuple[str, dict[str, Any] | None, str]:
        """The outcome of one process, what it found, and a line about one that found nothing."""
        options = self.options
        answer, stacks = self.folder / f"{name}.json", Path(options.stacks) / f"{name}.stacks"
        what = {
            "scenario": cell.scenario,
            "layout": cell.layout,
            "guarded": cell.guarded,
            "device": options.device,
            "threads": threads or options.threads,
            "seconds": options.seconds,
            "limit": options.limit,
        }
        program = (
            "import json, sys; from pathlib import Path; from benchmarks.compile_race_try import Try, run; "
            "run(Try(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))"
        )
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",  # a hit there compiles without a trace, and so without the race
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("w") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(what), str(answer), str(stacks)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                child.wait(options.limit + 60)
            except subprocess.TimeoutExpired:  # it does not even run its own clock: the interpreter's lock is held
                child.kill()
                child.wait()
        if answer.exists():
            stacks.unlink(missing_ok=True)
            found = json.loads(answer.read_text())
            return outcome(found), found, ""
        dumped = stacks.read_text() if stacks.exists() else ""
        if dumped:
            self.rows[cell].stacks.append(str(stacks))
            return hanging(dumped), None, f"no end within {options.limit:g} s"
        stacks.unlink(missing_ok=True)
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return "other", None, f"exit {child.returncode}: {lines[-1][:160] if lines else 'no word'}"


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    several = options.device == "cuda" and options.gpus > 1
    for layout in ("one", *(("several",) if several else ())):
        for scenario in SCENARIOS:
            for guarded in (False, True):
                yield Cell(layout, scenario, guarded)
    for scenario in IN_PROCESSES:
        yield Cell("processes", scenario, False)


def table(rows: dict[Cell, Row]) -> list[str]:
    """The table for people, at most 100 columns wide."""
    shown = [one for one in OUTCOMES if one in ("ok", "FX error", "deadlock", "dense", "poisoned", "other")]
    shown += [one for one in OUTCOMES if one not in shown and any(row.outcomes[one] for row in rows.values())]
    lines = [f"{'workers':<10}{'scenario':<9}{'':<6}" + "".join(f"{one:>9}" for one in shown) + "   failed / calls"]
    for cell, row in rows.items():
        counts = "".join(f"{row.outcomes[one] or '.':>9}" for one in shown)
        lines.append(f"{cell}{counts}   {row.failed} / {row.calls}")
    return lines


def gpus() -> int:
    """How many GPUs torch sees, asked in another process so that this one holds none."""
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(ask, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.compile_race", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is a GPU")
    parser.add_argument("--tries", type=int, default=3, help="of each cell")
    parser.add_argument("--seconds", type=float, default=2.0, help="that the threads of a try go on")
    parser.add_argument("--threads", type=int, default=3, help="workers of a try")
    parser.add_argument("--limit", type=float, help="seconds until a try hangs (90 on a GPU, 240 on the CPU)")
    parser.add_argument("--jobs", type=int, help="tries at once (a quarter of the cores)")
    parser.add_argument("--budget", type=float, default=380.0, help="seconds after which no try begins")
    parser.add_argument("--only", action="append", metavar="TEXT", help='cells that contain it, such as "cold"')
    parser.add_argument("--stacks", default="race-stacks", help="folder for the stacks of what hangs")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--strict", action="store_true", help="exit 1 unless guarded tries and processes are ok")
    options = parser.parse_args(argv)
    options.gpus = gpus()
    options.device = options.device or ("cuda" if options.gpus else "cpu")
    options.limit = options.limit or (90.0 if options.device == "cuda" else 240.0)
    options.jobs = options.jobs or max(1, len(os.sched_getaffinity(0)) // 4)
    return options


def main() -> int:
    options = parse()
    Path(options.stacks).mkdir(parents=True, exist_ok=True)
    options.stacks = str(Path(options.stacks).resolve())
    chosen = [one for one in cells(options) if not options.only or any(text in str(one) for text in options.only)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        bench = Bench(options, Path(folder))
        for cell in chosen:
            bench.rows[cell]  # in this order

        def attempt(cell: Cell, number: int) -> None:
            if time.monotonic() - began < options.budget:
                bench.attempt(cell, number)
                print(f"{time.monotonic() - began:6.0f} s  {cell}{dict(bench.rows[cell].outcomes)}", flush=True)

        list(pool.map(attempt, chosen * options.tries, [n for n in range(options.tries) for _ in chosen]))
    spent = time.monotonic() - began
    print(f"\ntorch {bench.torch or 'unknown'}, {options.device}, {options.gpus} GPUs, {options.threads} workers, "
          f"{options.seconds:g} s a try, {spent:.0f} s in all")  # fmt: skip
    print("\n".join(table(bench.rows)))
    for cell, row in bench.rows.items():
        for text, count in row.messages.most_common(3):
            print(f"  {cell}{count} x {text}")
        for path in row.stacks:
            print(f"  {cell}stacks: {path}")
    if options.json:
        rows = [{**asdict(cell), **vars(row), "tries": sum(row.outcomes.values())} for cell, row in bench.rows.items()]
        head = {"version": 1, "torch": bench.torch, "seconds": spent, "options": vars(options)}
        Path(options.json).write_text(json.dumps({**head, "rows": rows}, indent=1))
    with_care = [row for cell, row in bench.rows.items() if cell.guarded or cell.layout == "processes"]
    return int(options.strict and any(set(row.outcomes) != {"ok"} for row in with_care))


if __name__ == "__main__":
    sys.exit(main())
