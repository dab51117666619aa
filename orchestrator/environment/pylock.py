"""Reads the pylock.toml that uv writes: the names, addresses and hashes of wheels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

# One inline table of a wheel. uv writes each on a line of its own or as a list of one; Python 3.10 has no
# TOML reader.
_PACKAGE = re.compile(r"^\[\[packages\]\]$", re.MULTILINE)
_NAME = re.compile(r'^name = "([^"]+)"$', re.MULTILINE)
_VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_WHEEL = re.compile(r'\{ (?:name = "[^"]*", )?(url|path) = "([^"]+)"[^{}]*hashes = \{ ([^{}]*) \} \}')
_SHA256 = re.compile(r'sha256 = "([0-9a-f]{64})"')


@dataclass(frozen=True)
class NamedWheel:
    """A wheel that uv knows of."""

    name: str
    version: str
    url: str  # an address, or a path on this machine
    filename: str
    sha256: str

    @property
    def on_disk(self) -> bool:
        """Whether it lies on this machine, so that its hash was computed here and nobody vouches for it."""
        return urlsplit(self.url).scheme in ("", "file")


def read_pylock(text: str) -> list[NamedWheel]:
    """The wheels with a sha256 in a pylock.toml that uv wrote."""
    wheels = []
    for part in _PACKAGE.split(text)[1:]:
        name, version = _NAME.search(part), _VERSION.search(part)
        if not name or not version:
            continue
        for _, address, hashes in _WHEEL.findall(part):
            digest = _SHA256.search(hashes)
            filename = unquote(urlsplit(address).path.rsplit("/", 1)[-1])
            if digest and filename.endswith(".whl"):
                wheels.append(NamedWheel(name.group(1), version.group(1), address, filename, digest.group(1)))
    return wheels
