"""The remote programs packed as one zipapp, the same bytes for the same sources."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Tuple

# The modules are unpacked beside the zipapp the first time, since Python keeps compiled modules of folders only:
# compiling them anew would cost each session 0.1 s. Their sizes tell a folder that a crash of the machine left empty
# files in. Where a folder cannot be, they are imported from the zipapp.
MAIN = """\
import os
import sys

SIZES = %r
app = os.path.abspath(sys.argv[0])
folder = app + ".modules"


def whole():
    try:
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in SIZES.items())
    except OSError:
        return False


if not whole():
    import shutil
    import zipfile

    temporary = "%%s.%%d" %% (folder, os.getpid())
    try:
        with zipfile.ZipFile(app) as archive:
            archive.extractall(temporary, list(SIZES))
        if os.path.isdir(folder) and not whole():
            os.rename(folder, temporary + ".old")
        os.rename(temporary, folder)
    except OSError:
        pass
    for left in (temporary, temporary + ".old"):
        shutil.rmtree(left, ignore_errors=True)
if whole():
    sys.path.insert(0, folder)
from remote.__main__ import main

sys.exit(main(sys.argv[1:]))
"""
# Fixed, since a time stamp of the source tree would make another digest of each checkout.
STAMP = (2000, 1, 1, 0, 0, 0)
# Needed on the workstation only.
LEFT_OUT = ("zipapp.py",)


@functools.lru_cache(maxsize=1)
def build() -> Tuple[bytes, str]:
    """The zipapp and its sha256 in hex."""
    folder = Path(__file__).parent
    entries = {}
    for path in sorted(folder.glob("*.py")):
        if path.name not in LEFT_OUT:
            entries["remote/" + path.name] = path.read_bytes()
    sizes = {name: len(source) for name, source in entries.items()}
    entries["__main__.py"] = (MAIN % (sizes,)).encode("ascii")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name, STAMP)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, entries[name], compresslevel=9)
    data = packed.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def name(digest: str) -> str:
    """The file name at the place, under `<root>/bin/`."""
    return "orch-%s.pyz" % digest[:12]
