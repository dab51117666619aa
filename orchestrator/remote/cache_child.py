"""The process that writes the contents of a stream into files, or reads files into a stream.

It is one of its own, beside zstd and the server: each of 5,000 files takes some system calls, and a thread would wait
after each of them for the interpreter's lock, which the server's other threads want too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Dict, List

from .cache_files import PIECE, Damaged, read_checked, write_all
from .cache_stream import TAR_END, Unpacker, padding, tar_header
from .frames import PART_SIZE, OpError

TELL = 0.2  # seconds between two words of progress


def unpack(files: str, rows_path: str) -> Dict[str, Any]:
    """Writes the tar on stdin below `files`, and says how many bytes of contents have come, a line each time.

    `{"received", "missing": [sha256], "whole"}`. Raises OpError, OSError.
    """
    with open(rows_path, encoding="utf-8") as file:
        rows = json.load(file)
    unpacker = Unpacker(rows, files)
    told = time.monotonic()
    try:
        while True:
            data = os.read(0, PIECE)
            if not data:
                break
            unpacker.feed(data)
            if time.monotonic() - told >= TELL:
                told = time.monotonic()
                write_all(1, b"%d\n" % unpacker.received)
    finally:
        unpacker.close()
    return {"received": unpacker.received, "missing": list(unpacker.missing), "whole": unpacker.whole()}


def pack(files: str) -> None:
    """The contents of the rows on stdin (JSON), as a tar on stdout, each checked. Raises OpError, OSError."""
    with os.fdopen(os.dup(0), "rb") as file:
        rows = json.loads(file.read().decode("utf-8"))
    folder = os.open(files, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    pending = bytearray()

    def write(data: bytes) -> None:
        # together: a write for each small file would wake the reader 5,000 times
        pending.extend(data)
        if len(pending) >= PART_SIZE:
            write_all(1, bytes(pending))
            pending.clear()

    try:
        for row in rows:
            write(tar_header(row[2], row[1]))
            os.close(read_checked(row, folder, write))
            write(padding(row[1]))
    except Damaged as error:
        raise OpError("failed", str(error)) from None
    write_all(1, bytes(pending) + TAR_END)


def main(argv: List[str]) -> int:
    """`unpack FILES ROWS`, whose last line on stdout is a JSON object, or `pack FILES`, with one on stderr where it
    fails: `{"code", "message"}` of an OpError, `{"errno", "message"}` of an OSError."""
    said = 1 if argv[0] == "unpack" else 2
    report: Dict[str, Any] = {}
    try:
        if argv[0] == "unpack":
            report = unpack(argv[1], argv[2])
        else:
            pack(argv[1])
    except OpError as error:
        report = {"code": error.code, "message": error.message}
    except OSError as error:
        report = {"errno": error.errno, "message": error.strerror or str(error)}
    if report:
        write_all(said, json.dumps(report).encode("ascii") + b"\n")
    return 0 if "message" not in report else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
