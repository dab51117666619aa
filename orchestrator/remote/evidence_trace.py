"""Reading one Python traceback out of a log: whole, with what it was chained to, and past the lines of other ranks."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional, Tuple

MOST = 96 << 10  # bytes read from where it begins
LINES = 600
MESSAGE_LINES = 40  # of one exception
_HEAD = "Traceback (most recent call last)"
_DIRECT = "The above exception was the direct cause of the following exception"
_DURING = "During handling of the above exception, another exception occurred"
_RANK = re.compile(r"\[(?:rank|default)?\d+\]:")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
# a line that can be no part of an exception's message, where nothing else marks its end
_OTHER = re.compile(
    r"\[rank\d+\]|[WEI]\d{4} \d\d:|\d{4}-\d\d-\d\d|(?:step|epoch|iter)\b|Exception in thread|wandb:|"
    r"terminate called|Exception ignored|/\S+:\d+: \w*Warning"
)

Line = Tuple[int, str]  # offset, text without the prefix


class Traceback:
    """One that was found. `raised`: (offset, text with its further lines, how the next one came of it)."""

    def __init__(self, offset: int, prefix: str, thread: Optional[str]) -> None:
        self.offset = offset
        self.end = offset
        self.prefix = prefix
        self.thread = thread
        self.lines: List[str] = []
        self.raised: List[Tuple[int, str, str]] = []

    def report(self) -> Dict[str, Any]:
        return {
            "offset": self.offset,
            "end": self.end,
            "text": "\n".join(self.lines),
            "raised": [{"offset": at, "text": text, "then": then} for at, text, then in self.raised],
            "thread": self.thread,
            "prefix": self.prefix,
        }


def read_traceback(fd: int, offset: int) -> Optional[Traceback]:
    """The traceback whose first line begins at `offset`."""
    begin = max(0, offset - 512)
    data = os.pread(fd, MOST + offset - begin, begin)
    before = data[: offset - begin].decode("utf-8", "replace").rstrip("\r\n").rsplit("\n", 1)[-1]
    lines = _lines(data[offset - begin :], offset)
    if not lines or _HEAD not in lines[0][1]:
        return None
    prefix = lines[0][1].partition(_HEAD)[0]
    thread = re.search(r"Exception in thread (.{1,80}?):?\s*$", before)
    found = Traceback(offset, prefix, thread.group(1) if thread else None)
    _read(found, _mine(lines, prefix))
    return found


def _lines(data: bytes, offset: int) -> List[Line]:
    out: List[Line] = []
    at = 0
    while at < len(data) and len(out) < LINES * 3:
        end = data.find(b"\n", at)
        if end < 0:
            end = len(data)
        out.append((offset + at, data[at:end].decode("utf-8", "replace").rstrip("\r")))
        at = end + 1
    return out


def _mine(lines: List[Line], prefix: str) -> List[Line]:
    """The lines of the same writer, their prefix taken off."""
    out: List[Line] = []
    bare = prefix.rstrip()
    for at, text in lines:
        if prefix:
            if text.startswith(prefix):
                out.append((at, text[len(prefix) :]))
            elif text == bare:
                out.append((at, ""))
        elif not _RANK.match(text):
            out.append((at, text))
        if len(out) >= LINES:
            break
    return out


def _read(found: Traceback, lines: List[Line]) -> None:
    index = 0
    while index < len(lines):
        found.lines.append(lines[index][1])  # the head
        index += 1
        while index < len(lines) and (lines[index][1].startswith((" ", "\t")) or not lines[index][1]):
            found.lines.append(lines[index][1])
            index += 1
        if index >= len(lines):
            break
        at, text = lines[index]
        message = [text]
        index += 1
        while index < len(lines) and len(message) < MESSAGE_LINES and _goes_on(lines[index][1], found.prefix):
            message.append(lines[index][1])
            index += 1
        ahead = index
        while ahead < len(lines) and not lines[ahead][1].strip():
            ahead += 1
        how = lines[ahead][1] if ahead < len(lines) else ""
        then = "direct" if how.startswith(_DIRECT) else "during" if how.startswith(_DURING) else "last"
        found.raised.append((at, "\n".join(message), then))
        found.lines += message
        found.end = lines[index - 1][0] + len(lines[index - 1][1].encode("utf-8", "replace")) + len(found.prefix)
        if then == "last":
            break
        head = ahead + 1
        while head < len(lines) and _HEAD not in lines[head][1]:
            head += 1
        if head >= len(lines):
            break
        found.lines += ["", how, ""]
        index = head
    while found.lines and not found.lines[-1].strip():
        found.lines.pop()
    if not found.raised:  # cut off in the middle
        found.end = lines[min(index, len(lines)) - 1][0]


# how the further lines of torch's own messages begin
_FURTHER = re.compile(
    r"\s|CUDA kernel errors|For debugging|Compile with|Search for|GPU device may|Set TORCH|Set the environment|"
    r"Exception raised from|frame #|Device-side|ptxas|`ptxas`|Repro command|nccl|Last error|Duplicate GPU|"
    r"You can suppress|Command:|Output:|g\+\+ |"
    r"def |\^|\[rank|from user code|Importing|Hint|Triton|input |at \d+:"
)


def _goes_on(text: str, prefix: str) -> bool:
    """Whether a line still belongs to the message of the exception before it."""
    if _HEAD in text or text.startswith((_DIRECT, _DURING)) or _OTHER.match(text):
        return False
    if prefix:
        return not text.startswith("[")
    return bool(text.strip()) and _FURTHER.match(text) is not None


def is_exception(text: str) -> bool:
    """Whether a line looks like the last one of a traceback."""
    return _RAISED.match(text) is not None
