"""torch's own words for a broken entry of its compile cache, at the end of a console.log.

Only what can come from nothing else counts: the file that could not be loaded lies in a cache, or the frames of the
traceback are those of a cache. A program's own broken JSON is none of it, nor is what torch only warns of: an entry
that cannot be read is compiled anew, and the lines of its traceback have the logger's head before them.
"""

from __future__ import annotations

import os
import re
from typing import Optional

TAIL = 512 << 10  # bytes of the log's end: several ranks, each with its traceback
_CACHE = r"(?:torch_?inductor|inductor|triton|aot_?autograd|autotune_cache|codecache|compile_cache)"
_PREFIX = re.compile(r"^(?:\[[\w.:/ -]*?rank\d+\]:?|\[\w+\d+\]:|\(\w+ pid=\d+\)) ?")
_FRAME_OF_CACHE = re.compile(r'^\s*File "[^"]*\b_?%s' % _CACHE)
_NOT_LOADED = re.compile(
    r"(?:ImportError|OSError): (?P<path>\S*/%s/\S*): "
    r"(?:invalid ELF header|file too short|ELF load command|cannot read file data|undefined symbol)" % _CACHE
)
# PermissionError: kernels remember where they were compiled, and write their tuned configurations there.
_NOT_READ = re.compile(
    r"^(?:\S+: )?(?:[\w.]+\.)?(?:(?:JSONDecodeError|UnpicklingError|EOFError|PermissionError)\b"
    r"|RuntimeError: CUDA driver error: device kernel image is invalid)"
)
_NOT_ALLOWED = re.compile(
    r"PermissionError: \[Errno 13\] Permission denied: '[^']*/(?:%s/[^']*|locks/[^']*\.lock)'" % _CACHE
)
_NOT_IMPORTED = re.compile(
    r"RuntimeError: Failed to import \S*/%s/\S*\.py\b" % _CACHE
)  # generated code that is cut off
# The small libraries by which Inductor tries what the processor has are kept in the cache too. Where these do not load,
# it takes the processor for one without vectors, and the C++ that it has kept does not compile.
_NO_VECTORS = re.compile(
    r"/%s/\S*\.cpp:\d+:\d+: error: (?:.at::vec. has not been declared|no member named .vec. in namespace .at.)" % _CACHE
)
_TOLD = re.compile(r"the compile cache in .* has a damaged entry: ")  # by the bundled trainer
_ALONE = (_NOT_LOADED, _NOT_ALLOWED, _NOT_IMPORTED, _NO_VECTORS, _TOLD)
_TRACEBACK = "Traceback (most recent call last)"


def bad_entry(text: str) -> Optional[str]:
    """The line that tells of a broken entry, or None. `text`: the end of what the program said."""
    frames_of_cache = False
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw)
        if _TRACEBACK in line:
            frames_of_cache = False
        elif _FRAME_OF_CACHE.match(line):
            frames_of_cache = True
        elif any(words.search(line) for words in _ALONE) or (frames_of_cache and _NOT_READ.match(line)):
            return line.strip()
    return None


def bad_entry_in(path: str, start: int) -> Optional[str]:
    """`bad_entry` of a log from `start` on, TAIL bytes of its end at most. None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(start, size - TAIL))
            data = file.read(TAIL)
    except OSError:
        return None
    return bad_entry(data.decode("utf-8", "replace"))
