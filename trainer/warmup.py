"""Warm, then seal: everything that is compiled is compiled before the first collective, and nothing afterwards.

One rank of each kind of work on each kind of GPU compiles first, forward and backward, for every shape that the run
will use; the others wait for it, within bounds and saying so, and then find its kernels in the compile cache. After
that `torch.compiler.set_stance("fail_on_recompile")` makes any further compilation an error rather than a stall.

What was compiled is then shown not to be dense: the peak memory of one attention call is held against the scores that
dense attention would build, and the kernels that ran are named.
"""

import contextlib
import fcntl
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer import attention, dense_guard, moved_cache
from trainer.block_mask import Blocks, LayerKind
from trainer.compile_report import Graph, Report, folders
from trainer.errors import TrainerError

SAID_EVERY = 10.0  # seconds
DENSE_SHARE = 0.25  # of the dense scores' bytes: a compiled call stays below, a dense one is above 3
_COMPILING = ("BackendCompilerFailed", "InductorError")
_BROKEN = (  # what a library, or generated Python, says that was cut
    "file too short",
    "cannot read file data",
    "invalid ELF header",
    "Failed to import",
)
LEAST = 64 << 20  # bytes of dense scores below which memory proves nothing


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """What the warm-up of one rank found."""

    seconds: float
    compiled_here: bool  # or loaded from the cache that another rank has filled
    graphs: tuple[Graph, ...] = ()  # what was compiled or loaded
    evidence: dict[str, object] = field(default_factory=dict)

    def line(self) -> str:
        if not self.graphs:
            return f"tried in {self.seconds:.1f} s, with nothing to compile"
        hits, misses = (sum(each.hit is wanted for each in self.graphs) for wanted in (True, False))
        how = "compiled" if misses else "loaded" if self.compiled_here else "loaded what another rank compiled"
        return f"{how} in {self.seconds:.1f} s (compile cache: {hits} hits, {misses} misses)"

    def record(self) -> dict[str, object]:
        """For the metrics file."""
        return {
            "seconds": round(self.seconds, 2),
            "compiled_here": self.compiled_here,
            "graphs": {each.name: each.verdict for each in self.graphs},
            "evidence": self.evidence,
        }


def warm(
    work: Callable[[], None],
    *,
    folder: Path,
    name: str,
    who: str,
    timeout: float,
    say: Callable[[str], None] = print,
    report: Report | None = None,
) -> Warmed:
    """Runs `work`, which compiles. Of all processes that call this with the same folder and name, one goes first.
    `report` is told what it compiles; waiting for another process is no part of that.

    Raises TrainerError: the first one failed, or died, or took longer than `timeout` seconds. A process that was
    killed lets go of the lock, so nobody waits for it.
    """
    moved_cache.follow()
    folder.mkdir(parents=True, exist_ok=True)
    report = report or Report()
    told = len(report.graphs)
    began = time.perf_counter()
    with _locked(folder / f"{name}.lock", timeout, f"the first of `{name}`", folder / f"{name}.by", say):
        state = folder / f"{name}.state"
        said = json.loads(state.read_text()) if state.exists() else None
        if said is not None and not said["done"]:
            reason = said["reason"] or "it died while it compiled"
            raise TrainerError(f"{said['by']} compiled for all and did not get through: {reason}")
        first = said is None
        if first:
            _write(state, {"by": who, "done": False, "reason": ""})
            _write(folder / f"{name}.by", {"by": who, "since": time.time()})
            try:
                _run(work, report)
            except BaseException as error:
                _write(state, {"by": who, "done": False, "reason": reason_of(error)})
                raise
            _write(state, {"by": who, "done": True, "reason": ""})
    if not first:
        _run(work, report)
    graphs = tuple(report.graphs[told:])
    return Warmed(seconds=time.perf_counter() - began, compiled_here=first, graphs=graphs)


def _run(work: Callable[[], None], report: Report) -> None:
    try:
        with report.watch():
            work()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
    except Exception as error:
        text = str(error)
        if "out of resource" in text and "shared memory" in text:
            raise TrainerError(
                f"a kernel does not fit this GPU's shared memory for a block of threads ({_first_line(text)}); this is "
                "no lack of GPU memory: use a smaller head size, or another GPU"
            ) from error
        if damaged(error):
            traceback.print_exception(error)  # whoever looks for the cause finds torch's own words as well
            raise TrainerError(
                f"the compile cache in {' and '.join(map(str, folders()))} has a damaged entry: {reason_of(error)}; "
                "move that folder aside, and start again"
            ) from error
        raise


def damaged(error: BaseException | None) -> bool:
    """Whether a file of the compile cache could not be loaded. Entries of a graph that cannot be read are none of
    these: torch warns, and compiles anew."""
    while error is not None:
        kind, text = type(error).__name__, str(error)
        if kind in _COMPILING and any(words in text for words in _BROKEN):
            return True
        if kind in ("JSONDecodeError", "UnpicklingError"):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason_of(error: BaseException) -> str:
    """In one line: torch's errors of a compilation name the cause in their second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if lines[0].endswith("raised:"):
        lines[0] = " ".join(lines[:2])
    return f"{type(error).__name__}: {lines[0]}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if "out of resource" in line), text[:200])


def seal() -> None:
    """From here on, compiling is an error. The dense guard is looked at once more."""
    dense_guard.check()
    torch.compiler.set_stance("fail_on_recompile")


@contextlib.contextmanager
def _locked(path: Path, timeout: float, what: str, holder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A kernel lock: it is let go however its holder ends."""
    with path.open("a") as file:
        began = said = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                by = json.loads(holder.read_text())["by"] if holder.exists() else "another rank"
                if now - began > timeout:
                    raise TrainerError(f"{by} has been compiling for {timeout:.0f} s ({what}); gave up") from None
                if now - said > SAID_EVERY:
                    say(f"waiting for {by}, which compiles for all ({now - began:.0f} s)")
                    said = now
                time.sleep(0.1)
        yield


def _write(path: Path, content: dict) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def prove_not_dense(
    blocks: Blocks, kind: LayerKind, *, heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> dict[str, object]:
    """One compiled attention call, forward and backward, at the run's own shape, on the blocks' GPU.

    Raises TrainerError when its memory is that of dense attention, or no flex kernel ran. Returns the evidence.
    """
    rows, device = blocks.anchor.shape[0], blocks.anchor.device
    dense = rows * heads * blocks.queries * blocks.keys * 4

    def some(count: int, length: int) -> torch.Tensor:
        return torch.randn(rows, count, length, size, dtype=dtype, device=device, requires_grad=True)

    query, context = some(heads, blocks.queries), [some(kv_heads, blocks.context) for _ in range(2)]
    own = [some(kv_heads, blocks.queries) for _ in range(2)]
    attend = attention.flex_plan(blocks, [kind])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        attend(kind, query, tuple(context), tuple(own)).sum().backward()
        torch.cuda.synchronize()
    took = torch.cuda.max_memory_allocated(device) - before
    kernels = sorted({event.key for event in profile.key_averages() if "flex_attention" in event.key})
    evidence = {"dense_bytes": dense, "peak_bytes": took, "kernels": kernels}
    if not any(kernel.startswith("triton_tem_fused") for kernel in kernels):
        raise TrainerError(f"no compiled flex attention kernel ran on {device}: {evidence}")
    if dense > LEAST and took > DENSE_SHARE * dense:
        raise TrainerError(
            f"attention took {took / 2**30:.2f} GiB, and dense attention would take {dense / 2**30:.2f} GiB a copy: "
            f"it is not the compiled kernel that ran ({', '.join(kernels)})"
        )
    return evidence
