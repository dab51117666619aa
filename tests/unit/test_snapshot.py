from __future__ import annotations

import io
import os
import tarfile

from orchestrator.snapshot import snapshot, snapshot_bundled


def _tree(root, content="print(1)\n"):
    (root / "inner").mkdir(parents=True)
    (root / "a.py").write_text(content)
    (root / "inner" / "b c.txt").write_text("é")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "a.pyc").write_bytes(b"x")
    return root


def test_equal_trees_give_equal_bytes_whenever_they_were_made(tmp_path):
    one, two = _tree(tmp_path / "one"), _tree(tmp_path / "two")
    os.utime(two / "a.py", (1, 1))
    assert snapshot(one, "pkg").tar == snapshot(two, "pkg").tar


def test_a_changed_byte_name_or_mode_changes_the_digest(tmp_path):
    first = snapshot(_tree(tmp_path / "one"), "pkg").digest
    assert snapshot(_tree(tmp_path / "two", "print(2)\n"), "pkg").digest != first
    renamed = _tree(tmp_path / "three")
    (renamed / "a.py").rename(renamed / "z.py")
    assert snapshot(renamed, "pkg").digest != first
    executable = _tree(tmp_path / "four")
    (executable / "a.py").chmod(0o755)
    assert snapshot(executable, "pkg").digest != first


def test_caches_stay_behind(tmp_path):
    made = snapshot(_tree(tmp_path / "one"), "pkg")
    with tarfile.open(fileobj=io.BytesIO(made.tar)) as tar:
        assert tar.getnames() == ["pkg/a.py", "pkg/inner/b c.txt"]
    assert made.files == 2


def test_the_bundled_trainer_can_be_started_from_its_snapshot():
    with tarfile.open(fileobj=io.BytesIO(snapshot_bundled().tar)) as tar:
        assert {"trainer/__init__.py", "trainer/__main__.py"} <= set(tar.getnames())
