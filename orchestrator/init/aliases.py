"""The machines that the user's SSH configuration names."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DEEPEST = 16  # files that include one another, as in OpenSSH


@dataclass(frozen=True)
class Alias:
    """A name that `ssh NAME` takes, and what the configuration says beside it (may be empty)."""

    name: str
    detail: str = ""


def aliases(config: Path | None = None) -> list[Alias]:
    """Every name of a `Host` line without wildcards, in the order of the files, those that are included too.

    What cannot be read is passed over: `ssh` itself complains of it when it is used.
    """
    config = config or Path("~/.ssh/config").expanduser()
    found: dict[str, dict[str, str]] = {}
    current: list[str] = []
    for keyword, words in _lines(config, config.parent, 0):
        if keyword == "host":
            current = [word for word in words if not re.search(r"[*?!]", word)]
            for name in current:
                found.setdefault(name, {})
        elif keyword == "match":
            current = []
        elif keyword in ("hostname", "user", "port") and words:
            for name in current:
                found[name].setdefault(keyword, words[0])
    return [Alias(name, _detail(name, said)) for name, said in found.items()]


def _detail(name: str, said: dict[str, str]) -> str:
    host = said.get("hostname", "").replace("%h", name)
    user = f"{said['user']}@" if "user" in said and host else ""
    port = f":{said['port']}" if host and said.get("port", "22") != "22" else ""
    return f"{user}{host}{port}"


def _lines(path: Path, base: Path, depth: int) -> Iterator[tuple[str, list[str]]]:
    """Keyword (in lower case) and arguments of each line. A relative `Include` is taken from `base`."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        found = re.match(r"\s*([A-Za-z0-9]+)(?:\s*=\s*|\s+)(.*)", line)
        if found is None:
            continue
        keyword = found[1].lower()
        try:
            words = shlex.split(found[2], comments=True)
        except ValueError:
            words = found[2].split()
        if keyword != "include":
            yield keyword, words
        elif depth < _DEEPEST:
            for word in words:
                pattern = os.path.expanduser(word)  # noqa: PTH111  (an unknown ~user is no error)
                # base is of no account for an absolute pattern
                for name in sorted(glob.glob(str(base / pattern))):  # noqa: PTH207  (any pattern, absolute too)
                    yield from _lines(Path(name), base, depth + 1)
