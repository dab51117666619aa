"""Tuned configurations follow a compile cache to where it lies."""

import pickle
from types import SimpleNamespace

from torch._inductor.runtime.autotune_cache import AutotuneCache

from trainer import moved_cache

META = {"autotune_local_cache": True, "autotune_remote_cache": False}


def tuned(folder):
    return sorted(path.relative_to(folder).parent.name for path in folder.rglob("*.best_config"))


def save(cache):
    cache.save(SimpleNamespace(kwargs={"XBLOCK": 8}, num_warps=4, num_stages=1), 10)


def test_a_kernel_that_was_compiled_elsewhere_tunes_where_the_cache_is(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(old))
    assert moved_cache.follow() and moved_cache.follow()
    kept = AutotuneCache.create(META, str(old / "ab" / "cabcd.py"), "hash")
    save(kept)
    assert tuned(old) == ["ab"]
    stored = pickle.dumps(kept)

    old.rename(tmp_path / "gone")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(new))
    save(pickle.loads(stored))
    assert not old.exists() and tuned(new) == ["ab"]
    again = AutotuneCache.create(META, str(old / "ab" / "cabcd.py"), "hash")
    assert again._read()["XBLOCK"] == 8
    save(AutotuneCache.create(META, str(old / "cd" / "cdefg.py"), "hash"))
    assert not old.exists() and tuned(new) == ["ab", "cd"]
