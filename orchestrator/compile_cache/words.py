"""What a launch will find in its compile cache, and what its trainer found there, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.plain import plain

if TYPE_CHECKING:
    from orchestrator.compile_cache.key import Prediction


_ASIDE = ", as its snapshot was moved aside"


def took(seconds: float) -> str:
    """A duration in words: `47 s`, `6 m 12 s`, `1 h 04 m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def expected(prediction: Prediction | None, how: str = "") -> str:
    """What a launch will find in its cache, and how that came to be there."""
    if prediction is None:
        return "unknown"
    found = prediction.to_json()
    parts = [prediction.used or prediction.key, *([how] if how else []), _expected(found)]
    return ", ".join(parts[:-1]) + f": {parts[-1]}"


def _expected(cache: Mapping[str, Any]) -> str:
    predicted = cache.get("predicted")
    if predicted == "warm":
        return "warm expected"
    word = "C++ rebuild" if predicted == "rebuild" else "cold"
    return f"{word} expected{_because(cache)}{_last_cold(cache)}"


def _reasons(cache: Mapping[str, Any]) -> list[str]:
    """Why it is not warm, as predicted; a place may have written anything there."""
    said = cache.get("because")
    return [plain(str(one)) for one in said] if isinstance(said, (list, tuple)) else []


def _because(cache: Mapping[str, Any]) -> str:
    """` because triton 3.5.1 → 3.6.0`, or what else is known; "" where nothing is."""
    reasons = _reasons(cache)
    if not reasons:
        return ""
    # the first compile of all has no change behind it
    changed = len(reasons) > 1 or "→" in reasons[0] or "changed" in reasons[0]
    return f"{' because' if changed else ','} {', '.join(reasons)}"


def _last_cold(cache: Mapping[str, Any]) -> str:
    seconds = _seconds(cache.get("last_cold_seconds"))
    return "" if seconds is None else f"; last cold compile took {took(seconds)}"


def compiling(cache: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str:
    """What a run's compiling amounts to: by what its trainer told, else by what was expected; "" where neither is
    known. Such as `warm, 3 of 3 hits`, or `cold: 1 miss because triton 3.5.1 → 3.6.0`."""
    cache = cache or {}
    predicted = cache.get("predicted")
    hits, misses, rebuilt = (_count(found, name) for name in ("hits", "misses", "rebuilt"))
    if not found or not (hits or misses or rebuilt):
        if found and found.get("done"):
            return "nothing to compile"
        if predicted and cache.get("moved_aside"):
            return f"cold expected{_ASIDE}"
        return _expected(cache) if predicted else ""
    of = f"{hits} of {hits + misses} hits"
    if misses:
        why = ", which its key did not predict" if predicted == "warm" else _because(cache)
        why = _ASIDE if cache.get("moved_aside") else why
        return f"cold: {misses} miss{'' if misses == 1 else 'es'}{why}{_last_cold(cache)}"
    if rebuilt:
        why = f": {', '.join(_reasons(cache))}" if predicted == "rebuild" else ", which its key did not predict"
        return f"C++ rebuild{why}; {of}"
    return f"warm, {of}"


def compiled(cache: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str:
    """The same once it is over, with what it took; "" where the trainer told nothing."""
    if not found:
        return ""
    words = compiling(cache, found)
    seconds, new = _seconds(found.get("seconds")), found.get("new_files")
    more = [] if seconds is None else [took(seconds)]
    more += [f"{new} new file{'' if new == 1 else 's'}"] if isinstance(new, int) else []
    return f"compile cache: {words}" + (f" ({', '.join(more)})" if more else "")


def told(cache: Mapping[str, Any] | None) -> list[str]:
    """What the runner did with the cache that somebody should know: a snapshot moved aside, a harvest."""
    lines = []
    aside, harvest = (cache or {}).get("moved_aside"), (cache or {}).get("harvest")
    if isinstance(aside, dict):
        again = "; the trainer was started once more without it" if aside.get("restarted") else ""
        lines.append(plain(f"compile cache {aside.get('snapshot')} was moved aside: {aside.get('why')}{again}"))
    if isinstance(harvest, dict) and harvest.get("how") == "failed":
        lines.append(plain(f"what was compiled could not be kept: {harvest.get('why')}"))
    return lines


def kept(cache: Mapping[str, Any] | None) -> str:
    """What a run's compiling was kept as; "" where nothing was."""
    cache = cache or {}
    harvest = cache.get("harvest")
    if not isinstance(harvest, dict) or harvest.get("how") != "harvested":
        return ""
    return plain(f"compile cache kept as {cache.get('key')}/{harvest.get('digest')}: {_count(harvest, 'files')} files")


def _seconds(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return float(value) if known else None


def _count(found: Mapping[str, Any] | None, name: str) -> int:
    value = (found or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
