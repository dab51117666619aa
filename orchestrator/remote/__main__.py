"""Entry of the zipapp: `serve` answers requests on stdin, `runner` keeps one run, `cache_child` (un)packs contents."""

from __future__ import annotations

import sys
from typing import List


def main(argv: List[str]) -> int:
    """Runs one of the programs; each is imported only when it is asked for."""
    if argv[:1] == ["serve"] and len(argv) == 3:
        from . import serve

        return serve.main(argv[1:])
    if argv[:1] == ["runner"]:
        from . import runner

        return int(runner.main(argv[1:]) or 0)
    if argv[:1] == ["cache_child"]:
        from . import cache_child

        return cache_child.main(argv[1:])
    sys.stderr.write("usage: serve NONCE ROOT | runner RUN_DIRECTORY\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
