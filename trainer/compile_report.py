"""What compiling comes to: whether the compile cache had each graph, and whether native code was built all the same.

Torch's counters say that inductor found a graph's entry, not what loading it took. Without a GPU the entry's C++ is
built again where the path of the environment is another: torch counts a hit, and it takes as long as a miss. So the
cache's folders are looked at too: a graph was *rebuilt* if it was a hit and this process has loaded native code that
was not in them before.

torch tells when it begins and ends to compile a graph (`torch._dynamo.callback`): forward when it is first called,
backward at the first backward pass. An entry of AOTAutograd has both, so that a hit brings the backward along. What is
compiled is known by the name that `graph` gives it, which costs nothing where no report is being made.

The first compilation makes the run's phase `compiling`. Each graph becomes a line of the metrics file as soon as it is
known, and all of them together one at the end:
    {"phase": "compiling"}
    {"compile": {"graph": "drafter attention backward", "kind": "backward", "hit": true, "rebuilt": false,
                 "seconds": 0.4, "rank": 0}}
    {"compile": {"done": true, "hits": 3, "misses": 0, "rebuilt": 0, "new_files": 0, "seconds": 2.1, "rank": 0}}
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COUNTED = {
    "fx_hits": ("inductor", "fxgraph_cache_hit"),
    "fx_misses": ("inductor", "fxgraph_cache_miss"),
    "fx_bypasses": ("inductor", "fxgraph_cache_bypass"),
    "aot_hits": ("aot_autograd", "autograd_cache_hit"),
    "aot_misses": ("aot_autograd", "autograd_cache_miss"),
}
NATIVE, TUNED = ".so", ".best_config"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was seen while one graph was compiled or loaded."""

    fx_hits: int = 0
    fx_misses: int = 0
    fx_bypasses: int = 0  # compiled, and not kept: the graph cannot be cached
    aot_hits: int = 0
    aot_misses: int = 0
    built: int = 0  # libraries and tuned configurations that were not there before, and that this process uses


def classify(reading: Reading) -> tuple[bool | None, bool]:
    """(hit, rebuilt). The first is None where nothing was counted, as for a graph that was never to be cached.

    A hit takes every layer: a graph that AOTAutograd had to trace again is a miss, though its kernels were there.
    """
    if reading.fx_misses or reading.fx_bypasses or reading.aot_misses:
        return False, False
    if reading.fx_hits or reading.aot_hits:
        return True, reading.built > 0
    return None, False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What became of one."""

    name: str  # with its kind
    kind: str
    hit: bool | None
    rebuilt: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.verdict}, {self.seconds:.1f} s"

    @property
    def verdict(self) -> str:
        if self.hit is None:
            return "unknown"
        return ("hit, but rebuilt" if self.rebuilt else "hit") if self.hit else "miss"


@dataclass
class _Watched:
    """One compilation, from its beginning."""

    backward: bool
    name: str
    kind: str
    counted: dict[str, int]
    began: float
    error: BaseException | None  # that was being handled already
    seconds: float = 0.0
    failed: bool = False


_name: ContextVar[tuple[str, str]] = ContextVar("_name")
_watching: "Report | None" = None
_NOTHING = contextlib.nullcontext()


def graph(name: str, kind: str) -> contextlib.AbstractContextManager[None]:
    """Around a call that may compile: what it compiles is `name` of this kind, and `name` backward. Of such calls
    within each other the outermost names."""
    return _NOTHING if _watching is None or _name.get(None) else _named(name, kind)


@contextlib.contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    token = _name.set((name, kind))
    try:
        yield
    finally:
        _name.reset(token)


@dataclass(kw_only=True)
class Report:
    """Of one rank. Nothing here fails: what cannot be read is unknown, and what cannot be written is not told."""

    path: Path | None = None  # the metrics file
    rank: int = 0
    alone: bool = True  # no other rank compiles into the same folders
    say: Callable[[str], None] | None = None  # of each graph, as it is known
    graphs: list[Graph] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # names of graphs
    new_files: int = 0
    seconds: float = 0.0  # of all that was watched
    _files: set[str] = field(default_factory=set)
    _names: dict[str, str] = field(default_factory=dict)  # by the compilation's number
    _now: _Watched | None = None
    _phase_told: bool = False
    _last: tuple[_Watched, dict[str, int]] | None = None  # has ended, and may still be tuned when it first runs

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around work that compiles. Not nested, and by one thread at a time."""
        global _watching
        began = time.perf_counter()
        handler = _handler()
        if handler is not None:
            self._files = _files()
            handler.register_start_callback(self._begins)
            handler.register_end_callback(self._ends)
        _watching = self
        try:
            yield
        finally:
            _watching = None
            if handler is not None:
                handler.remove_start_callback(self._begins)
                handler.remove_end_callback(self._ends)
                self._settle()
            self.seconds += time.perf_counter() - began

    def done(self) -> None:
        """All of this rank's graphs are there: the last line. Nothing where there was nothing to compile."""
        if self.graphs:
            self._write({"done": True, **self.figures(), "rank": self.rank})

    def figures(self) -> dict[str, Any]:
        return {
            "hits": sum(each.hit is True for each in self.graphs),
            "misses": sum(each.hit is False for each in self.graphs),
            "rebuilt": sum(each.rebuilt for each in self.graphs),
            "new_files": self.new_files,
            "seconds": round(self.seconds, 2),
        }

    def line(self) -> str:
        """All of it, for the console."""
        if not self.graphs:
            return "compile cache: nothing to compile"
        hits, misses, rebuilt = (self.figures()[name] for name in ("hits", "misses", "rebuilt"))
        state = "cold" if misses else "rebuilt" if rebuilt else "warm" if hits else "unknown"
        files = "no new file" if not self.new_files else f"{self.new_files} new file{'s' * (self.new_files > 1)}"
        worse = [each for each in self.graphs if each.verdict != "hit"]
        last = f" ({'; '.join(map(str, worse))})" if worse else ""
        return f"compile cache {state}: {hits} of {len(self.graphs)} hits, {files}, {self.seconds:.1f} s{last}"

    # torch calls these two, and lets pass what they raise

    def _begins(self, args: Any) -> None:
        with contextlib.suppress(Exception):
            self._settle()
            if not self._phase_told:
                self._phase_told = True
                self._append({"phase": "compiling"})
            backward = args.callback_trigger.name == "LAZY_BACKWARD"
            if backward:
                name, kind = self._names.get(str(args.compile_id), f"graph {args.compile_id}"), "backward"
            else:
                name, kind = _name.get((f"graph {args.compile_id}", "forward"))
                self._names[str(args.compile_id)] = name
            error = sys.exc_info()[1]
            self._now = _Watched(backward, name, kind, _counted(), time.perf_counter(), error)

    def _ends(self, args: Any) -> None:
        with contextlib.suppress(Exception):
            now, self._now = self._now, None
            if now is None:
                return
            now.seconds = time.perf_counter() - now.began
            now.failed = sys.exc_info()[1] is not now.error
            counted = {name: count - now.counted[name] for name, count in _counted().items()}
            self._last = now, counted

    def _settle(self) -> None:
        """What is new in the folders belongs to the compilation before."""
        last, self._last = self._last, None
        if last is None:
            return
        watched, counted = last
        if watched.failed:
            self.failed.append(f"{watched.name} {watched.kind}")
            return
        files = _files()
        new = files - self._files
        self._files |= files
        self.new_files += len(new)
        built = _used(new) + (sum(path.endswith(TUNED) for path in new) if self.alone else 0)
        hit, rebuilt = classify(Reading(**counted, built=built))
        self._tell(watched.name, watched.kind, hit, rebuilt, watched.seconds)
        # an entry of AOTAutograd has the two graphs of a function that is differentiated
        if not watched.backward and hit and counted["aot_hits"] and counted["fx_hits"] > 1:
            self._tell(watched.name, "backward", hit, rebuilt, 0.0)

    def _tell(self, name: str, kind: str, hit: bool | None, rebuilt: bool, seconds: float) -> None:
        told = Graph(name=f"{name} {kind}", kind=kind, hit=hit, rebuilt=rebuilt, seconds=round(seconds, 2))
        self.graphs.append(told)
        if self.say is not None:
            self.say(str(told))
        self._write(
            {
                "graph": told.name,
                "kind": kind,
                "hit": hit,
                "rebuilt": rebuilt,
                "seconds": told.seconds,
                "rank": self.rank,
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        self._append({"compile": record})

    def _append(self, line: dict[str, Any]) -> None:
        """One write: ranks append to the same file."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, (json.dumps({**line, "time": round(time.time(), 3)}) + "\n").encode())
            finally:
                os.close(file)


def _handler() -> Any:
    """None where this torch tells nothing of what it compiles."""
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return None
    return callback_handler


def _counted() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {name: counters[layer][counter] for name, (layer, counter) in COUNTED.items()}


def folders() -> list[Path]:
    """Inductor's, and Triton's where it has one of its own."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    inductor = Path(cache_dir())
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or inductor)
    return [inductor] if triton.is_relative_to(inductor) else [inductor, triton]


def _files() -> set[str]:
    """Real paths of all that lasts: no locks, and nothing half written."""
    found: set[str] = set()
    with contextlib.suppress(ImportError, OSError):
        for folder in folders():
            for here, below, names in os.walk(os.path.realpath(folder)):
                below[:] = [name for name in below if name != "locks"]
                found.update(f"{here}/{name}" for name in names if not name.endswith((".lock", ".tmp")))
    return found


def _used(new: set[str]) -> int:
    """How many of the libraries this process has loaded; others may have been built by other ranks, or be trials."""
    native = {path for path in new if path.endswith(NATIVE)}
    if not native:
        return 0
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return len(native & {line.split(maxsplit=5)[5] for line in lines if line.endswith(NATIVE)})
    except (OSError, IndexError):
        return len(native)
