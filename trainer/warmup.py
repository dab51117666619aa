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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer import attention, dense_guard
from trainer.block_mask import Blocks, LayerKind
from trainer.errors import TrainerError

SAID_EVERY = 10.0  # seconds
DENSE_SHARE = 0.25  # of the dense scores' bytes: a compiled call stays below, a dense one is above 3
LEAST = 64 << 20  # bytes of dense scores below which memory proves nothing


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """What the warm-up of one rank found."""

    seconds: float
    compiled_here: bool  # or loaded from the cache that another rank has filled
    hits: int  # of the compile cache
    misses: int
    evidence: dict[str, object] = field(default_factory=dict)

    def line(self) -> str:
        if not self.hits and not self.misses:
            return f"tried in {self.seconds:.1f} s, with nothing to compile"
        how = "compiled" if self.compiled_here else "loaded what another rank compiled"
        return f"{how} in {self.seconds:.1f} s (compile cache: {self.hits} hits, {self.misses} misses)"


def warm(
    work: Callable[[], None],
    *,
    folder: Path,
    name: str,
    who: str,
    timeout: float,
    say: Callable[[str], None] = print,
) -> Warmed:
    """Runs `work`, which compiles. Of all processes that call this with the same folder and name, one goes first.

    Raises TrainerError: the first one failed, or died, or took longer than `timeout` seconds. A process that was
    killed lets go of the lock, so nobody waits for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _cache_counters()
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
                _run(work)
            except BaseException as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                _write(state, {"by": who, "done": False, "reason": f"{type(error).__name__}: {reason}"})
                raise
            _write(state, {"by": who, "done": True, "reason": ""})
    if not first:
        _run(work)
    hits, misses = (now - then for now, then in zip(_cache_counters(), before, strict=True))
    return Warmed(seconds=time.perf_counter() - began, compiled_here=first, hits=hits, misses=misses)


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        text = str(error)
        if "out of resource" in text and "shared memory" in text:
            raise TrainerError(
                f"a kernel does not fit this GPU's shared memory for a block of threads ({_first_line(text)}); this is "
                "no lack of GPU memory: use a smaller head size, or another GPU"
            ) from error
        raise
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


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


def _cache_counters() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters["inductor"]
    return counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]


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
