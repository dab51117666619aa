"""Text from elsewhere, made harmless: what a place, a program or a file says must not steer the terminal."""

from __future__ import annotations

import re

# All but tab and newline; and half characters, which no file, database or terminal takes.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with every control character replaced."""
    return _CONTROL.sub("�", text)
