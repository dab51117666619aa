"""Reading metrics.jsonl, which any program may write: a line is an object with some of `step`, `loss`,
`tokens` (in this step, not in all), `time` (seconds), `phase`, `eval`, `compile` (see `Compiled`).

A last line without its end is left for later, a broken one is counted and passed over, NaN and Infinity are
let pass (they come out as None: other JSON readers do not know them).
"""

from __future__ import annotations

import collections
import json
import math
import os
from typing import Any, Deque, Dict, Optional, Tuple

from .rundir import open_file

Line = Dict[str, Any]

TAIL = 256 << 10  # bytes read of a large file
WINDOW_SECONDS, WINDOW_STEPS = 30.0, 20
_LONGEST = 1 << 20  # a line beyond this is none
_FIGURES = ("hits", "misses", "rebuilt", "new_files", "seconds")
_WORST = ("misses", "rebuilt", "graphs")
_NAMES = 8


class Compiled:
    """What ranks tell of the compile cache: `{"graph", "kind", "hit", "rebuilt", "seconds", "rank"}` for each graph,
    then `{"done": true, "hits", "misses", "rebuilt", "new_files", "seconds", "rank"}`, whose figures stand for theirs.
    """

    def __init__(self) -> None:
        self._ranks: Dict[int, Dict[str, Any]] = {}

    def feed(self, told: Any) -> None:
        """One line's `compile`; what is of another kind is passed over."""
        if not isinstance(told, dict):
            return
        rank = self._ranks.setdefault(int(_number(told.get("rank")) or 0), {"done": {}, "missed": []})
        if told.get("done") is True:
            # several in turn, as one for each kind of GPU, add up
            for name in _FIGURES:
                rank["done"][name] = rank["done"].get(name, 0) + (_number(told.get(name)) or 0)
            rank["under way"] = {}
            return
        under_way = rank.setdefault("under way", {})
        hit, rebuilt = told.get("hit"), told.get("rebuilt") is True
        for name, more in (("hits", hit is True), ("misses", hit is False), ("rebuilt", rebuilt)):
            under_way[name] = under_way.get(name, 0) + more
        under_way["seconds"] = under_way.get("seconds", 0) + (_number(told.get("seconds")) or 0)
        if hit is False and isinstance(told.get("graph"), str) and len(rank["missed"]) < _NAMES:
            rank["missed"].append(told["graph"][:200])

    def summary(self) -> Optional[Dict[str, Any]]:
        """`{"hits", "misses", "rebuilt", "graphs", "new_files", "seconds", "done", "ranks", "rank", "missed"}`, None
        while nothing was told.

        The figures are those of the rank that fared worst (`rank`; of equals the lowest), `missed` its graphs by name;
        `seconds` and `new_files` are the largest of all. `done`: no rank has told of a graph since it was done.
        """
        if not self._ranks:
            return None
        figures = {number: _added(rank) for number, rank in self._ranks.items()}
        worst = min(figures, key=lambda number: [-figures[number][name] for name in _WORST] + [number])
        found: Dict[str, Any] = {name: int(figures[worst][name]) for name in ("hits", "misses", "rebuilt")}
        found["graphs"] = int(figures[worst]["graphs"])
        found["new_files"] = int(max(one["new_files"] for one in figures.values()))
        found["seconds"] = round(max(one["seconds"] for one in figures.values()), 2)
        found["done"] = not any(rank.get("under way", True) for rank in self._ranks.values())
        found.update(ranks=len(figures), rank=worst, missed=list(self._ranks[worst]["missed"]))
        return found


def _added(rank: Dict[str, Any]) -> Dict[str, float]:
    figures = {name: rank["done"].get(name, 0) + rank.get("under way", {}).get(name, 0) for name in _FIGURES}
    return dict(figures, graphs=figures["hits"] + figures["misses"])


class Summary:
    """What the lines fed so far amount to."""

    def __init__(self) -> None:
        self.lines = 0
        self.broken = 0
        self.last: Optional[Line] = None  # the last line with a step that is no evaluation
        self.eval: Optional[Line] = None  # the last line with "eval"
        self.step: Optional[int] = None
        self.phase: Optional[str] = None  # what the program says of itself
        self.compiled = Compiled()
        self._recent: Deque[Tuple[float, float]] = collections.deque(maxlen=4096)

    def feed(self, raw: bytes) -> None:
        """One line, without its newline."""
        if not raw.strip():
            return
        line = _load(raw)
        if line is None:
            self.broken += 1
            return
        self.lines += 1
        step, phase = _number(line.get("step")), line.get("phase")
        if isinstance(phase, str):
            self.phase = phase
        if step is not None:
            self.step = int(step)
        if "compile" in line:
            self.compiled.feed(line["compile"])
        if line.get("eval") is not None:
            self.eval = line
        elif step is not None:
            self.last = line
            self._remember(line)

    def _remember(self, line: Line) -> None:
        tokens, at = _number(line.get("tokens")), _number(line.get("time"))
        if tokens is None or at is None:
            return
        if self._recent and at < self._recent[-1][0]:
            self._recent.clear()  # the clock was set back, or the program began anew
        self._recent.append((at, tokens))

    def tokens_per_second(self) -> Optional[float]:
        """Tokens over time between the lines of the last window: 30 s, or 20 steps if those took longer.

        The first line of a window only says when it began: the first step, with its compiling, is never
        counted. None with fewer than two lines that have both.
        """
        recent = list(self._recent)
        if len(recent) < 2:
            return None
        begin = len(recent) - 1
        newest = recent[-1][0]
        while begin > 0:
            within = newest - recent[begin - 1][0] <= WINDOW_SECONDS
            if not within and len(recent) - begin > WINDOW_STEPS:
                break
            begin -= 1
        span = newest - recent[begin][0]
        if span <= 0:
            return None
        return sum(tokens for _, tokens in recent[begin + 1 :]) / span


class Follower:
    """Feeds a Summary with what is appended to a file, a bounded piece a step."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.summary = Summary()
        self._offset = 0
        self._partial = b""

    def step(self, most: int = 1 << 20) -> bool:
        """Read on; whether there were new lines. OSError is swallowed (the file need not exist). A file
        that shrank is read from its start."""
        try:
            with open_file(self.path) as f:
                size = os.fstat(f.fileno()).st_size
                if size < self._offset:
                    self._offset, self._partial = 0, b""
                if size == self._offset:
                    return False
                f.seek(self._offset)
                data = f.read(most)
        except OSError:
            return False
        self._offset += len(data)
        whole, newline, rest = (self._partial + data).rpartition(b"\n")
        self._partial = rest
        if len(self._partial) > _LONGEST:
            self._partial = b"\xff"  # certainly broken, and short
        if newline:
            for raw in whole.split(b"\n"):
                self.summary.feed(raw)
        return bool(newline)


def read(path: str, tail: int = TAIL) -> Dict[str, Any]:
    """`{"last", "tokens_per_second", "eval", "phase", "count", "broken", "why"}` of the file's end.

    `count` (lines that could be read) is None where the file is longer than `tail` bytes. `why` says why
    there is nothing, else it is None.
    """
    summary, count, why = Summary(), None, None
    try:
        with open_file(path) as f:
            size = os.fstat(f.fileno()).st_size
            start = max(0, size - tail)
            f.seek(start)
            data = f.read(tail)
    except OSError as e:
        data, start, why = b"", 0, "metrics.jsonl: %s" % e.strerror
    if start:
        data = data.partition(b"\n")[2]  # its first line began before
    for raw in data.split(b"\n")[:-1]:
        summary.feed(raw)
    if not start and why is None:
        count = summary.lines
    return {
        "last": summary.last,
        "tokens_per_second": _rounded(summary.tokens_per_second()),
        "eval": summary.eval,
        "phase": summary.phase,
        "count": count,
        "broken": summary.broken,
        "why": why,
    }


def _rounded(value: Optional[float]) -> Optional[float]:
    return None if value is None else round(value, 1)


def _number(value: Any) -> Optional[float]:
    """The value if it is a finite number, else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def _load(raw: bytes) -> Optional[Line]:
    try:
        line = json.loads(raw.decode("utf-8"), parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
