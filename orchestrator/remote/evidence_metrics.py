"""What metrics.jsonl and gpu.jsonl amount to, for a diagnosis. A file of any size is read in bounded pieces."""

from __future__ import annotations

import json
import math
import os
import statistics
from typing import Any, Dict, List, Optional

from .rundir import open_file

HEAD, TAIL = 256 << 10, 1 << 20
_RECENT, _EARLY = 20, 20


def summary(path: str) -> Optional[Dict[str, Any]]:
    """See `facts.Metrics`; None where there is no such file or no line with a step."""
    head, tail, whole = _ends(path)
    lines = [line for line in (_load(raw) for raw in [*head, *tail]) if line is not None and "step" in line]
    if not lines:
        return None
    phase = next((line.get("phase") for line in reversed(lines) if line.get("phase")), None)
    steps = [line for line in lines if line.get("eval") is None and "loss" in line]
    losses = [line["loss"] for line in steps if _finite(line["loss"])]
    last = steps[-1] if steps else lines[-1]
    nan_step, nan_count = _nan(steps)
    recent = _timed((steps or lines)[-_RECENT - 1 :])
    early = _timed(((steps or lines)[2:] if whole or head else [])[: _EARLY + 1])
    times = [line["time"] for line in recent]
    gaps = [after - before for before, after in zip(times, times[1:]) if after > before]  # noqa: RUF007  (3.8)
    return {
        "lines": len(lines),
        "last_step": _whole(last.get("step")),
        "last_time": last.get("time") if _finite(last.get("time")) else None,
        "last_loss": last.get("loss") if _finite(last.get("loss")) else None,
        "best_loss": min(losses) if losses else None,
        "nan_step": nan_step,
        "nan_count": nan_count,
        "step_seconds": statistics.median(gaps) if gaps else None,
        "rate": _rate(recent),
        "early_rate": _rate(early),
        "phase": phase if isinstance(phase, str) else None,
    }


def samples(path: str) -> Optional[Dict[str, Any]]:
    """`{"count_first", "errors", "utilization", "span", "memory_peak"}`: the cards at first; the last errors; the mean
    use of all cards in each of the last samples that were below a few percent, and the seconds these cover."""
    head, tail, _ = _ends(path)
    lines = [line for line in (_load(raw) for raw in [*head, *tail]) if line is not None]
    if not lines:
        return None
    errors = [str(line["error"]) for line in lines[-20:] if line.get("error")]
    errors += [str(text) for line in lines[-20:] for text in line.get("problems") or ()]
    with_gpus = [line for line in lines if line.get("gpus")]
    quiet: List[float] = []
    span = 0.0
    for line in reversed(with_gpus):
        used = [gpu["utilization"] for gpu in line["gpus"] if _finite(gpu.get("utilization"))]
        if not used or (quiet and max(used) > 3):
            break
        quiet.append(sum(used) / len(used))
        span = with_gpus[-1]["at"] - line["at"]
        if len(quiet) >= 400 or max(used) > 3:
            break
    peak = [gpu["memory_used"] for line in with_gpus for gpu in line["gpus"] if _finite(gpu.get("memory_used"))]
    return {
        "count_first": len(with_gpus[0]["gpus"]) if with_gpus else None,
        "errors": list(dict.fromkeys(errors))[-5:],
        "utilization": quiet[::-1],
        "span": span,
        "memory_peak": max(peak) * (1 << 20) if peak else None,
    }


def last_lines(path: str, most: int) -> List[Dict[str, Any]]:
    """The last objects of a file of JSON lines."""
    _, tail, _ = _ends(path)
    found = [line for line in (_load(raw) for raw in tail[-most:]) if line is not None]
    return found[-most:]


def _ends(path: str) -> Any:
    """(lines of the file's beginning, lines of its end, whether the end is all of it)."""
    try:
        with open_file(path) as f:
            size = os.fstat(f.fileno()).st_size
            if size <= HEAD + TAIL:
                return [], f.read().split(b"\n"), True
            head = f.read(HEAD).split(b"\n")[:-1]
            f.seek(size - TAIL)
            return head, f.read().split(b"\n")[1:], False
    except OSError:
        return [], [], True


def _load(raw: bytes) -> Optional[Dict[str, Any]]:
    if not raw.strip():
        return None
    try:
        line = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _nan(steps: List[Dict[str, Any]]) -> Any:
    """(the step that the last unbroken run of losses that are no numbers begins with, how many lines it has)."""
    first, count = None, 0
    for line in reversed(steps):
        if not _not_a_number(line["loss"]):
            break
        first, count = _whole(line.get("step")), count + 1
    return first, count


def _not_a_number(loss: Any) -> bool:
    if isinstance(loss, str):
        return loss.lower().lstrip("+-") in ("nan", "inf", "infinity")
    return isinstance(loss, float) and not math.isfinite(loss)


def _timed(lines: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [line for line in lines if _finite(line.get("time"))]


def _rate(lines: List[Dict[str, Any]]) -> Optional[float]:
    if len(lines) < 3:
        return None
    span = lines[-1]["time"] - lines[0]["time"]
    tokens = sum(line["tokens"] for line in lines[1:] if _finite(line.get("tokens")))
    return tokens / span if span > 0 and tokens > 0 else None


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> Optional[int]:
    return int(value) if _finite(value) else None
