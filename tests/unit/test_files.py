"""Files at the place: nothing leaves the root, nothing is half there."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile

import pytest

from orchestrator.remote import files
from orchestrator.remote.frames import OpError


class Call:
    """An upload, as the server would hand it to an operation."""

    def __init__(self, root, parts=()):
        self.root = str(root)
        self._parts = parts

    def parts(self):
        yield from self._parts


def put(root, path, data, parts=None, **more):
    args = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), **more}
    return files.put(args, Call(root, [data] if parts is None else parts))


def tar(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                info.mode = 0o755 if name.endswith(".sh") else 0o666
                archive.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                archive.addfile(info)
    return packed.getvalue()


def everything(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name != "tmp")


def test_a_file_is_put_and_got(tmp_path):
    data = os.urandom(1000)
    assert put(tmp_path, "code/a", data, parts=[data[:300], data[300:]], mode=0o600)["how"] == "new"
    assert (tmp_path / "code/a").stat().st_mode & 0o777 == 0o600
    assert files.get({"path": "code/a"}, Call(tmp_path))[1] == data
    assert files.get({"path": "code/a", "offset": 10, "length": 5}, Call(tmp_path))[1] == data[10:15]
    assert files.have({"paths": ["code/b", "code/a"]}, Call(tmp_path)) == {"paths": ["code/a"]}
    assert everything(tmp_path) == ["code", "code/a"]


def test_what_is_there_stays(tmp_path):
    put(tmp_path, "a", b"first")
    assert put(tmp_path, "a", b"second")["how"] == "there"
    assert (tmp_path / "a").read_bytes() == b"first"


def test_a_tree_is_unpacked(tmp_path):
    data = tar(
        ("./", tarfile.DIRTYPE, ""),
        ("sub/run.sh", tarfile.REGTYPE, b"#!/bin/sh\n"),
        ("sub/data", tarfile.REGTYPE, b"x"),
        ("link", tarfile.SYMTYPE, "sub/data"),
    )
    assert put(tmp_path, "code/tree", data, unpack="tar")["how"] == "new"
    assert (tmp_path / "code/tree/link").read_bytes() == b"x"
    assert os.access(tmp_path / "code/tree/sub/run.sh", os.X_OK)
    assert not os.access(tmp_path / "code/tree/sub/data", os.X_OK)
    assert put(tmp_path, "code/tree", data, unpack="tar")["how"] == "there"


@pytest.mark.parametrize(
    "members",
    [
        [("/etc/x", tarfile.REGTYPE, b"")],
        [("../x", tarfile.REGTYPE, b"")],
        [("a/../../x", tarfile.REGTYPE, b"")],
        [("link", tarfile.SYMTYPE, "/etc")],
        [("link", tarfile.SYMTYPE, "../../x")],
        [("a/link", tarfile.SYMTYPE, "../../x")],
        [("one", tarfile.SYMTYPE, "."), ("one/x", tarfile.REGTYPE, b"")],
        [("d", tarfile.SYMTYPE, "e"), ("e", tarfile.SYMTYPE, "d/../..")],
        [("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [("fifo", tarfile.FIFOTYPE, "")],
        [("device", tarfile.CHRTYPE, "")],
        [("twice", tarfile.REGTYPE, b"1"), ("twice", tarfile.REGTYPE, b"2")],
    ],
)
def test_an_archive_that_would_leave_its_folder_is_refused(tmp_path, members):
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(OpError):
        put(root, "code/tree", tar(*members), unpack="tar")
    assert everything(root) == []
    assert list(tmp_path.iterdir()) == [root]


def test_not_an_archive(tmp_path):
    with pytest.raises(OpError, match="cannot be unpacked"):
        put(tmp_path, "code/tree", b"nonsense" * 100, unpack="tar")
    assert everything(tmp_path) == []


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b", "out/x"])
def test_paths_stay_under_the_root(tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "out").symlink_to(tmp_path / "elsewhere")
    for op in (
        lambda: put(root, path, b"x"),
        lambda: files.get({"path": path}, Call(root)),
        lambda: files.have({"paths": [path]}, Call(root)),
    ):
        with pytest.raises(OpError, match="leads out"):
            op()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_links_are_not_followed(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to("/etc/passwd")
    with pytest.raises(OpError, match="is a link"):
        files.get({"path": "link"}, Call(tmp_path / "root"))


def test_only_regular_files_are_got(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(OpError, match="not a regular file"):
            files.get({"path": name}, Call(tmp_path))
    with pytest.raises(OpError, match="there is no") as caught:
        files.get({"path": "none"}, Call(tmp_path))
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("parts", [[b"abc"], [b"abcd", b"efgh"], [b"abcdeX"], []])
def test_what_arrives_damaged_is_not_kept(tmp_path, parts):
    with pytest.raises(OpError):
        put(tmp_path, "a", b"abcdef", parts=parts)
    assert everything(tmp_path) == []


def test_a_client_that_goes_leaves_nothing(tmp_path):
    class Gone(Exception):
        pass

    def parts():
        yield b"abc"
        raise Gone

    with pytest.raises(Gone):
        put(tmp_path, "a", b"abcdef", parts=parts())
    assert everything(tmp_path) == []


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OpError, match=r"the disk is full: no room for .*/a \(3 bytes\)"):
        put(tmp_path, "a", b"abc")
    assert everything(tmp_path) == []


def test_what_dead_writers_left_is_swept(tmp_path):
    dead, live, young = (tmp_path / "tmp" / f"put-{name}" for name in ("dead", "live", "young"))
    for folder in (dead, live, young):
        (folder / "tree").mkdir(parents=True)
    for folder in (dead, live):
        os.utime(folder, (0, 0))
    import fcntl

    fd = os.open(live, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        put(tmp_path, "a", b"abc")
    finally:
        os.close(fd)
    assert not dead.exists() and live.exists() and young.exists()
