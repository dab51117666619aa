"""Where in a large file any of many literals stands: by grep where there is one, else by Python alone.

Both ways give the same offsets, in rising order. GNU grep looks for all literals in one pass (2 GB in about two
seconds); Python, where there is no such grep, for one after another in each block.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .rundir import open_file
from .tmux import search_path

Hit = Tuple[int, int]  # offset, line number (from 1)

BLOCK = 4 << 20
_GREP_MEMORY = 160 << 20
_READ = 1 << 16


class Finder:
    """Offsets of literals in one file, from its start to `size`. `drop` leaves a literal out from here on."""

    def __init__(self, path: str, literals: Sequence[bytes], size: int) -> None:
        self._path = path
        self._literals: Set[bytes] = set(literals)
        self._size = size
        self._dropped = False

    def drop(self, literal: bytes) -> None:
        if literal in self._literals:
            self._literals.discard(literal)
            self._dropped = True

    def replace(self, literal: bytes, by: Sequence[bytes]) -> None:
        """Look for others in place of one that stands in too many lines."""
        self._literals.discard(literal)
        self._literals.update(by)
        self._dropped = True

    def hits(self, plain: bool = False) -> Iterator[Hit]:
        """Each literal's places; of two that begin at one place, or overlap, one alone need be told."""
        grep = None if plain else gnu_grep()
        start, line = 0, 1
        while grep is not None and start < self._size and self._literals:
            self._dropped = False
            done = None
            for offset, number in self._by_grep(grep, start, line):
                if offset < 0:
                    done = bool(number)
                    break
                yield offset, number
                if self._dropped:
                    # grep is asked anew, from the next line on, without that literal
                    start, line = self._next_line(offset), number + 1
                    break
            else:
                return
            if done is False:
                break  # it failed: the plain way goes on from where the last good answer was
            if done:
                return
        if grep is None or (start < self._size and self._literals):
            for hit in self._by_hand(start, line):
                yield hit

    def _next_line(self, offset: int) -> int:
        with open_file(self._path) as f:
            f.seek(offset)
            at = offset
            while True:
                block = f.read(_READ)
                if not block:
                    return self._size
                found = block.find(b"\n")
                if found >= 0:
                    return at + found + 1
                at += len(block)

    def _by_grep(self, grep: str, start: int, line: int) -> Iterator[Hit]:
        """Ends with (-1, 1) when grep came to the end, (-1, 0) when it failed."""
        with tempfile.NamedTemporaryFile(prefix="orch-literals-") as words:
            words.write(b"\n".join(sorted(self._literals)))
            words.flush()
            with open_file(self._path) as f:
                os.lseek(f.fileno(), start, os.SEEK_SET)
                process = subprocess.Popen(
                    [grep, "-anobF", "-f", words.name],
                    stdin=f,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={"LC_ALL": "C", "PATH": search_path()},
                    preexec_fn=_bounded,
                )
            assert process.stdout is not None
            try:
                base = 0 if _counts_from_the_start(grep) else start
                for row in process.stdout:
                    number, _, rest = row.partition(b":")
                    offset, _, _ = rest.partition(b":")
                    if not (number.isdigit() and offset.isdigit()):
                        continue
                    at = int(offset) + base
                    if at >= self._size:
                        break
                    yield at, line + int(number) - 1
                else:
                    yield -1, int(process.wait() in (0, 1))
                    return
                yield -1, 1
            finally:
                process.stdout.close()
                with contextlib.suppress(OSError):
                    process.kill()
                process.wait()

    def _by_hand(self, start: int, line: int) -> Iterator[Hit]:
        overlap = max([len(literal) for literal in self._literals] + [1]) - 1
        with open_file(self._path) as f:
            f.seek(start)
            at, kept = start, b""
            while at < self._size:
                block = f.read(min(BLOCK, self._size - at))
                if not block:
                    return
                window = kept + block
                base = at - len(kept)
                counted = 0
                for offset in self._in_window(window, len(kept)):
                    line += window.count(b"\n", counted, offset)
                    counted = offset
                    yield base + offset, line
                rest = len(window) - min(overlap, len(window))
                line += window.count(b"\n", counted, rest) if counted <= rest else -window.count(b"\n", rest, counted)
                kept = window[len(window) - min(overlap, len(window)) :]
                at += len(block)

    def _in_window(self, window: bytes, kept: int) -> List[int]:
        """Places that end behind the part that was looked at with the block before."""
        found: Set[int] = set()
        for literal in self._literals:
            at = window.find(literal)
            while at >= 0:
                if at + len(literal) > kept:
                    found.add(at)
                at = window.find(literal, at + 1)
        return sorted(found)


def gnu_grep() -> Optional[str]:
    """The path of a GNU grep; others do not tell offsets, or are slow."""
    path = shutil.which("grep", path=search_path())
    if path is None:
        return None
    known: Optional[str] = _known.get(path)
    if known is None:
        try:
            said = subprocess.run(
                [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            said = b""
        known = _known[path] = "gnu" if b"GNU grep" in said else "other"
    return path if known == "gnu" else None


_known: Dict[str, str] = {}


def _counts_from_the_start(grep: str) -> bool:
    """Whether offsets in a file that is read from its middle are of the file, or of what was read; versions differ."""
    if grep not in _absolute:
        with tempfile.TemporaryFile() as probe:
            probe.write(b"first\nsecond\n")
            probe.flush()
            os.lseek(probe.fileno(), 6, os.SEEK_SET)
            said = subprocess.run(
                [grep, "-abo", "second"], stdin=probe, capture_output=True, env={"LC_ALL": "C"}, check=False
            ).stdout
        _absolute[grep] = said.startswith(b"6:")
    return _absolute[grep]


_absolute: Dict[str, bool] = {}


def _bounded() -> None:
    """A line without an end would be held in memory whole: grep gives up instead, and Python goes on."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_GREP_MEMORY, _GREP_MEMORY))
