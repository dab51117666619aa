"""A compile cache that lies elsewhere than where it was filled: torch's tuned configurations are sought where it is.

A kernel that is loaded with a cached graph remembers the file that it was compiled from, and reads and writes its tuned
configuration beside that: in a folder that is another run's, or gone, or that this user may not write, which ends the
run with a PermissionError (seen with torch 2.11 on a GPU). Here they are those of the same name in the cache at hand.
"""

import functools
from pathlib import Path
from typing import Any


def follow() -> bool:
    """From now on in this process; -> whether this torch has what is changed for it. Once is enough."""
    try:
        from torch._inductor.runtime.autotune_cache import AutotuneCache
    except ImportError:
        return False
    create, restore = getattr(AutotuneCache, "create", None), getattr(AutotuneCache, "__setstate__", None)
    if create is None or restore is None:
        return False
    if hasattr(create, "follows"):
        return True

    @functools.wraps(create)
    def created(inductor_meta: Any, filename: str, *rest: Any) -> Any:
        return create(inductor_meta, here(filename), *rest)

    @functools.wraps(restore)
    def restored(self: Any, state: dict[str, Any]) -> None:
        restore(self, state)
        local = getattr(self, "local_cache", None)
        if local is not None:
            self.local_cache = (local[0], here(local[1]))

    created.follows = True
    AutotuneCache.create, AutotuneCache.__setstate__ = staticmethod(created), restored
    return True


def here(path: str) -> str:
    """`<folder of a cache>/<two letters>/<name>` in the cache that this process uses."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(Path(cache_dir(), *Path(path).parts[-2:]))
