"""How a program of this very package is started: from the zipapp that it came from, or where it lies loose."""

from __future__ import annotations

import os
import sys
from typing import List


def command(module: str, *arguments: str) -> List[str]:
    """The command line of `module`'s main, which `__main__` knows by the same name."""
    package = os.path.dirname(os.path.abspath(__file__))
    archive = os.path.dirname(package)
    if os.path.isfile(archive):
        return [sys.executable, "-I", archive, module, *arguments]
    name: List[str] = []
    top = package
    for part in reversed((__package__ or "").split(".")):
        top = os.path.dirname(top)
        name.insert(0, part)
    code = "import sys; sys.path.insert(0, %r); from %s.%s import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-I", "-c", code % (top, ".".join(name), module), *arguments]
