"""A code snapshot at the place: whether it still is what its name says, and what is in it."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call

_DIGEST = re.compile(r"[0-9a-f]{16}\Z")
LINK = 0o120777  # in a digest, in place of a file's mode


def code_tree(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{digest}` -> `{"present", "intact", "files": {path: sha256}}` of `code/<digest>`.

    It is intact when digesting it gives its name, by the same rule as on the workstation.
    """
    digest = args.get("digest")
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise OpError("usage", "%r is not the digest of a code snapshot" % (digest,))
    tree = os.path.join(call.root, "code", digest)
    if not os.path.isdir(tree):
        return {"present": False, "intact": False, "files": {}}
    whole = hashlib.sha256()
    found = {}
    for parts, path in _files(tree):
        link = os.path.islink(path)
        if link:
            data, mode = os.fsencode(os.readlink(path)), LINK
        else:
            with open(path, "rb") as file:
                data = file.read()
            mode = 0o755 if os.stat(path).st_mode & 0o100 else 0o644
        name = "/".join(parts)
        whole.update(("%s\0%o\0%d\0" % (name, mode, len(data))).encode("utf-8", "surrogateescape"))
        whole.update(data)
        found[name] = hashlib.sha256((b"link\0" if link else b"") + data).hexdigest()
    return {"present": True, "intact": whole.hexdigest()[:16] == digest, "files": found}


def _files(tree: str) -> List[Tuple[Tuple[str, ...], str]]:
    """Every file and link by the parts of its path, in order; what Python compiled there by itself is no source."""
    found = []
    for folder, folders, names in os.walk(tree):
        inner = os.path.relpath(folder, tree)
        parts = () if inner == "." else tuple(inner.split(os.sep))
        if "__pycache__" in parts:
            continue
        for name in names + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
            if not name.endswith(".pyc"):
                found.append(((*parts, name), os.path.join(folder, name)))
    return sorted(found)


OPS = {"code_tree": code_tree}
