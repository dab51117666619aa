"""What each key means, in the words of the documentation: its tables are the one source of them.

A table has the columns key, type, default and meaning. Where a page is missing, there are no words.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from orchestrator.bundled import bundled_dir

# What a table describes -> its page in docs/, and the heading that it stands under (None: the page's first table).
_TABLES: dict[str, tuple[str, str | None]] = {
    "recipe": ("recipes.md", "Keys"),
    "environment": ("recipes.md", "Environments"),
    "places": ("places.md", None),
    "rules": ("rules.md", None),
    "host": ("hosts.md", "A host"),
    "ssh": ("hosts.md", "ssh"),
    "containers": ("hosts.md", "containers"),
}
_ROW = re.compile(r"^\| (`[^|]*) \| ((?:\\\||[^|])*) \| ((?:\\\||[^|])*) \| ((?:\\\||[^|])*) \|$")


@dataclass(frozen=True)
class Table:
    """The rows of one table, by key; those of a mapping within have dotted keys or a table of their own."""

    rows: dict[str, str]
    prefix: str = ""

    def text(self, key: str) -> str:
        """The meaning of a key, what it takes, and what holds without it; "" where the documentation is silent."""
        return self.rows.get(self.prefix + key, "")

    def below(self, key: str) -> Table:
        """The table of the mapping at that key."""
        return table(key) if key in ("places", "rules", "ssh", "containers") else Table(self.rows, f"{key}.")


@functools.lru_cache(maxsize=16)
def table(name: str) -> Table:
    """The table that describes this."""
    page, heading = _TABLES[name]
    try:
        text = (bundled_dir() / "docs" / page).read_text(encoding="utf-8")
    except OSError:
        return Table({})
    if heading is not None:
        text = re.split(r"^#+ ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows: dict[str, str] = {}
    for line in text.splitlines():
        found = _ROW.match(line)
        if found is None:
            if rows and not line.startswith("|"):
                break  # the first table only
            continue
        keys, kind, default, meaning = found.groups()
        for key in re.findall(r"`([\w.]+)`", keys):
            rows[key] = _sentence(kind, default, meaning)
    return Table(rows)


def _sentence(kind: str, default: str, meaning: str) -> str:
    """`seconds, 0 to 86400 (default: 30). How long …`"""
    kind, default, meaning = (_plain(text) for text in (kind, default, meaning))
    head = kind + (f" ({default})" if default == "must be there" else f" (default: {default})")
    return f"{head}. {meaning[:1].upper()}{meaning[1:]}" if meaning else head


def _plain(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links
    return re.sub(r" \(below\)|; see below", "", text).replace("\\|", "|").strip()
