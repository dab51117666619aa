"""Short texts for people: durations, bytes, rates, GPU memory."""

from __future__ import annotations

from orchestrator.plain import plain

_LONGEST_LINE = 500  # characters of a line of log that are shown


def duration(seconds: float | None) -> str:
    """`47s`, `3m12s`, `5h04m`, `2d03h`; a dash for an unknown one."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(count: float | None) -> str:
    """Bytes in decimal units: `812 B`, `64.2 MB`."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def rate(tokens_per_second: float | None) -> str:
    """Tokens a second: `850`, `20.1k`, `1.2M`."""
    if tokens_per_second is None:
        return "-"
    if tokens_per_second < 1000:
        return f"{tokens_per_second:.0f}"
    if tokens_per_second < 1e6:
        return f"{tokens_per_second / 1e3:.1f}k"
    return f"{tokens_per_second / 1e6:.1f}M"


def number(value: float | None, form: str = ".3f") -> str:
    """A figure, or a dash for one that is not known."""
    return "-" if value is None else format(value, form)


def mebibytes(used: float | None, total: float | None) -> str:
    """GPU memory in GiB: `68.4/141`."""
    if used is None and total is None:
        return "-"
    left = "-" if used is None else f"{used / 1024:.1f}"
    right = "-" if total is None else f"{total / 1024:.0f}"
    return f"{left}/{right}"


def printable(text: str) -> str:
    """What a remote program wrote, without the control characters that could move the cursor or worse.

    A line that was overwritten by carriage returns shows its last state, one without end its beginning.
    """
    shown = text.rstrip("\r\n").rsplit("\r", 1)[-1]
    clean = plain(_without_escapes(shown[: 4 * _LONGEST_LINE])).replace("\n", "�")
    return clean if len(clean) <= _LONGEST_LINE else clean[: _LONGEST_LINE - 1] + "…"


def _without_escapes(text: str) -> str:
    import re

    return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])", "", text)
