"""Compile caches at the place: received whole or not at all, found, sent, verified, collected."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.models import Host, Place
from orchestrator.errors import ConnectionLost, OrchError
from orchestrator.place.session import open_session
from orchestrator.remote import (
    cache_care,
    cache_files,
    cache_parts,
    cache_store,
    cache_stream,
    cache_sweep,
    caches,
    processes,
)
from orchestrator.remote import generations as gens
from orchestrator.remote.cache_files import check_manifest, contents, digest_of, key_of, make_manifest, why_not
from orchestrator.remote.frames import OpError

from .caches import (
    FILES,
    KEY,
    LABEL,
    PARTS,
    Call,
    expected,
    manifest_of,
    nothing_half,
    packed,
    send,
    sha,
    snapshot,
    stage,
    tar_of,
    tree,
)
from .remote_runs import eventually

ENCODINGS = [
    pytest.param("zstd", marks=pytest.mark.skipif(not shutil.which("zstd"), reason="no zstd")),
    "gzip",
    "plain",
]
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
FEW = settings(max_examples=60, deadline=None)


def care(root: Path, op: str, **args: Any) -> Any:
    return cache_care.OPS[op](args, Call(root))


# ---- manifests ------------------------------------------------------------------------------

names = st.sampled_from(
    ["inductor", "triton", "a", "b", "..", ".", "", "x.lock", "locks", "é", "\0", "a" * 300, "\udc80"]
)
paths = st.builds("/".join, st.lists(names, max_size=6)) | st.builds("/inductor/{}".format, names)


@FEW
@given(st.lists(paths, max_size=5))
def test_no_path_of_a_manifest_leads_out(found: list[str]) -> None:
    rows = [[path, 1, "0" * 64, False] for path in found]
    try:
        check_manifest({"version": 1, "files": rows, "bytes": len(rows), "digest": digest_of(rows)})
    except OpError as error:
        assert error.code == "refused"
        return
    for path in found:
        assert os.path.normpath(path) == path and path.split("/")[0] in ("inductor", "triton")
        assert "\0" not in path and not path.endswith(".lock")
    assert len(set(found)) == len(found)
    assert not any(other.startswith(path + "/") for path in found for other in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "no manifest"),
        ({"files": None}, "no manifest"),
        ({"bytes": 3}, "bytes"),
        ({"digest": "0" * 16}, "digest"),
        ({"files": [["inductor/a", -1, "0" * 64, False]]}, "size"),
        ({"files": [["inductor/a", True, "0" * 64, False]]}, "size"),
        ({"files": [["inductor/a", 1, "0" * 64, 1]]}, "mode"),
        ({"files": [["inductor/a", 1, "0" * 63 + "/", False]]}, "digest"),
        ({"files": [["inductor/a", 1, "0" * 64]]}, "row"),
        ({"files": [["inductor/a", 1, "0" * 64, False], ["inductor/b", 2, "0" * 64, False]]}, "contradicts"),
        ({"files": [["inductor/a", 1, "0" * 64, False], ["inductor/a/b", 1, "0" * 64, False]]}, "file and a folder"),
        ({"files": [["etc/passwd", 1, "0" * 64, False]]}, "none of the folders"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(OpError, match=words):
        stage(tmp_path, manifest={**manifest_of(FILES), **change})
    assert nothing_half(tmp_path) and not cache_store.snapshots(str(tmp_path), KEY)


def test_digests_are_of_what_is_there_and_nothing_else() -> None:
    one = manifest_of(FILES)
    assert one["digest"] == digest_of(reversed(one["files"])) == manifest_of(FILES, made=2.0)["digest"]
    assert one["digest"] != manifest_of(FILES, programs=())["digest"]
    assert one["digest"] != manifest_of({**FILES, "inductor/empty": b"x"})["digest"]
    assert dict(contents(one["files"])) == {sha(data): len(data) for data in FILES.values()}
    assert key_of(PARTS) == key_of(dict(reversed(PARTS.items()))) != key_of({**PARTS, "triton": "3.6.0"})


# ---- the stream -----------------------------------------------------------------------------


@FEW
@given(st.lists(st.binary(max_size=1500), max_size=6), st.integers(1, 1400), st.booleans())
def test_unpacking_in_any_pieces_is_what_tar_does(
    tmp_path_factory: pytest.TempPathFactory, found: list[bytes], size: int, end: bool
) -> None:
    """The plain twin is the standard library's tar."""
    data = tar_of(found, end)
    folder = tmp_path_factory.mktemp("unpacked")
    rows = [[f"inductor/{number}", len(one), sha(one), False] for number, one in enumerate(found)]
    unpacker = cache_stream.Unpacker(rows, str(folder))
    for at in range(0, len(data), size):
        unpacker.feed(data[at : at + size])
    unpacker.close()
    assert unpacker.whole() and not unpacker.missing
    assert [(folder / f"inductor/{number}").read_bytes() for number in range(len(found))] == found


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 8 << 30, (8 << 30) + 7])
def test_headers_are_what_tar_reads_and_writes(size: int) -> None:
    name = sha(b"x")
    info = tarfile.TarInfo.frombuf(cache_stream.tar_header(name, size), "ascii", "strict")
    assert (info.name, info.size, info.isreg()) == (name, size, True)
    theirs = tarfile.TarInfo(name)
    theirs.size = size
    assert cache_stream.read_header(theirs.tobuf(tarfile.GNU_FORMAT)) == (name, size)
    broken = bytearray(cache_stream.tar_header(name, size))
    broken[130] ^= 1
    with pytest.raises(OpError, match="check sum"):
        cache_stream.read_header(bytes(broken))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_cache_comes_and_goes_whole(tmp_path: Path, encoding: str) -> None:
    answer = stage(tmp_path, encoding=encoding)
    digest = answer["digest"]
    distinct = {sha(data): data for data in FILES.values()}
    assert (answer["how"], answer["current"], answer["linked"]) == ("new", digest, 0)
    assert answer["bytes"] == sum(map(len, distinct.values()))
    assert tree(snapshot(tmp_path, digest) / "files") == expected()
    assert nothing_half(tmp_path)
    told, stream = send(tmp_path, digest, encoding)
    assert told == {"contents": len(distinct), "bytes": answer["bytes"], "encoding": encoding}
    opened = {"gzip": gzip.decompress, "plain": bytes}.get(encoding) or (
        lambda data: subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True).stdout
    )
    with tarfile.open(fileobj=BytesIO(opened(stream))) as archive:
        came = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert came == distinct
    few = sorted(distinct)[:2]
    with tarfile.open(fileobj=BytesIO(opened(send(tmp_path, digest, encoding, few)[1]))) as archive:
        assert sorted(archive.getnames()) == few
    other = tmp_path / "other"
    assert stage(other, stream=stream, encoding=encoding)["digest"] == digest
    assert tree(snapshot(other, digest) / "files") == expected()


def test_only_what_is_lacking_travels(tmp_path: Path) -> None:
    first = stage(tmp_path)["digest"]
    more = {**FILES, "inductor/new": b"new", "triton/moved": FILES["triton/ABC/kernel.cubin"], "inductor/run": b"new"}
    told = contents(manifest_of(more)["files"])
    payload = b"".join(bytes.fromhex(one) for one, _ in told)
    answer, lacking = caches.cache_lacking({"key": KEY}, Call(tmp_path, payload))
    assert answer == {"lacking": 1} and [one for (one, _), flag in zip(told, lacking, strict=True) if flag] == [
        sha(b"new")
    ]
    manifest = manifest_of(more, programs={"inductor/cd/tool", "inductor/run"}, parent=first)
    answer = stage(tmp_path, stream=tar_of([b"new"]), manifest=manifest, current=False)
    assert (answer["how"], answer["bytes"], answer["current"]) == ("new", 3, first)
    assert answer["linked"] == len(told) - 1
    assert tree(snapshot(tmp_path, answer["digest"]) / "files") == expected(more, {"inductor/cd/tool", "inductor/run"})
    again = stage(tmp_path, stream=b"", manifest=manifest)
    assert (again["how"], again["bytes"], again["current"]) == ("there", 0, manifest["digest"])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stream_that_is_wrong_leaves_nothing(tmp_path: Path, encoding: str) -> None:
    whole = tar_of(FILES.values())
    last = list(FILES.values())[-1]
    altered = whole.replace(b"cubincubin", b"cubincubIn", 1)
    assert altered != whole
    sound = packed(whole, encoding)
    cases = {
        "is not what was sent": packed(altered, encoding),
        "was not asked for": packed(tar_of([*FILES.values(), b"foreign"]), encoding),
        "neither came nor lie here": packed(tar_of([data for data in FILES.values() if data != last]), encoding),
        "check sum|no content": packed(b"nonsense" * 200, encoding),
        "too early|cannot be unpacked|in the middle": sound[: len(sound) // 3],
    }
    if encoding != "plain":
        cases["cannot be unpacked"] = b"nonsense" * 200
    for words, stream in cases.items():
        with pytest.raises(OpError, match=words):
            stage(tmp_path, stream=stream, encoding=encoding)
        assert nothing_half(tmp_path) and cache_store.snapshots(str(tmp_path), KEY) == []
        assert cache_store.current(str(tmp_path), KEY) is None
    assert stage(tmp_path, encoding=encoding)["how"] == "new"


def test_what_lies_here_damaged_is_not_reused(tmp_path: Path) -> None:
    digest = stage(tmp_path)["digest"]
    path = snapshot(tmp_path, digest) / "files/triton/ABC/kernel.cubin"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OpError, match="send them all"):
        stage(tmp_path, stream=tar_of([b"new"]), manifest=manifest_of({**FILES, "inductor/new": b"new"}))
    with pytest.raises(OpError, match=r"kernel\.cubin is cut off: 4999 of 5000"):
        send(tmp_path, digest, "plain")
    assert nothing_half(tmp_path)


# ---- faults on the way ----------------------------------------------------------------------


def staging(root: Path, after: int, then: Any) -> Exception | None:
    """Uploads over a real session; `then` is called with it once `after` bytes have gone."""
    data = {f"inductor/{number}": os.urandom(200_000) for number in range(40)}
    stream = tar_of(data.values())
    args = {"key": KEY, "parts": PARTS, "label": LABEL, "encoding": "plain"}

    def chunks(it: Any) -> Iterator[bytes]:
        for at in range(0, len(stream), 100_000):
            if at >= after and then is not None:
                then(it)
            yield stream[at : at + 100_000]

    it = open_session(Place(Host(name="local", root=str(root))))
    try:
        it.upload("cache_stage", args, chunks(it), payload=json.dumps(manifest_of(data)).encode(), timeout=20)
    except (OrchError, ConnectionLost) as error:
        return error
    finally:
        it.close()
    return None


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_staging_that_is_cut_off_leaves_nothing_and_the_next_one_starts_cleanly(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"

    def wait_for_some() -> None:
        eventually(lambda: any((root / "caches/tmp").rglob("inductor/*")))

    def cut(it: Any) -> None:
        wait_for_some()
        it.connection.close()

    def killed(it: Any) -> None:
        wait_for_some()
        os.kill(it.connection._open[0]._child.pid, signal.SIGKILL)
        time.sleep(0.1)

    def left() -> list[Path]:
        return list((root / "caches/tmp").iterdir())

    assert isinstance(staging(root, 4_000_000, {"cut": cut, "killed": killed}[how]), ConnectionLost)
    assert cache_store.snapshots(str(root), KEY) == []
    if how == "cut":
        eventually(lambda: not left())  # the server there notices, and cleans up
    assert bool(left()) == (how == "killed")
    for folder in left():
        os.utime(folder, (0, 0))
    assert staging(root, 0, None) is None
    assert len(cache_store.snapshots(str(root), KEY)) == 1 and nothing_half(root)


@ROOT
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(small)], stderr=subprocess.DEVNULL):
        pytest.skip("cannot mount a small file system here")
    try:
        error = staging(small, 0, None)
        assert error is not None and "the disk is full: no room for the compile cache" in str(error)
        assert cache_store.snapshots(str(small), KEY) == [] and nothing_half(small)
        assert stage(small)["how"] == "new"
    finally:
        subprocess.call(["umount", "-l", str(small)])


# ---- finding --------------------------------------------------------------------------------


def find(root: Path, parts: dict[str, Any] = PARTS, **more: Any) -> dict[str, Any]:
    args = {"parts": parts, "environment": None, "recipe": "demo", "want": None, **more}
    return caches.cache_find(args, Call(root))


def test_finding_says_all_that_a_launch_has_to_know(tmp_path: Path) -> None:
    empty = find(tmp_path)
    assert (empty["key"], empty["present"], empty["relatives"], empty["last_cold"]) == (KEY, None, [], None)
    assert empty["programs"]["zstd"] == bool(shutil.which("zstd")) and empty["snapshots"] == 0 and empty["free"] > 0
    digest = stage(tmp_path)["digest"]
    other = {**PARTS, "triton": "3.6.0"}
    stage(tmp_path, key=key_of(other), parts=other)
    root = str(tmp_path)
    for at, recipe, seconds in ((10.0, "another", 5.0), (20.0, "demo", 372.0), (30.0, "another", 7.0)):
        line = {"run": "r", "recipe": recipe, "at": at, "cold": True, "compile_seconds": seconds}
        cache_store.used(root, key_of(other), line)
    cache_store.used(root, KEY, {"run": "r", "recipe": "another", "at": 40.0, "cold": False, "compile_seconds": 1.0})
    found = find(tmp_path, want=f"{KEY}/{digest}")
    assert found["present"] == {"digest": digest, "bytes": sum(map(len, FILES.values())), "made": 1000.0,
                                "cold_seconds": 60.0, "files": len(FILES)}  # fmt: skip
    assert found["wanted"] == {**found["present"], "key": KEY, "parts": PARTS}
    (relative,) = found["relatives"]
    assert (relative["parts"]["triton"], relative["same_recipe"], relative["label"]) == ("3.6.0", True, LABEL)
    assert found["last_cold"] == {"seconds": 372.0, "at": 20.0, "key": key_of(other)}
    assert find(tmp_path, want=f"{KEY}/{'0' * 16}")["wanted"] is None
    for wrong in ("..", f"{KEY}/../x", f"{KEY}"):
        with pytest.raises(OpError, match="no snapshot"):
            find(tmp_path, want=wrong)


def test_parts_that_only_the_place_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ident = "0123456789abcdef"
    home = tmp_path / "envs" / ident
    home.mkdir(parents=True)
    site = "lib/python3.11/site-packages"
    table = {
        f"{site}/torch/a.py": [1, 2, "aa", "torch"], f"{site}/torch/lib/b.so.1": [1, 2, "bb", "torch"],
        f"{site}/torch/doc.txt": [1, 2, "cc", "torch"], f"{site}/other/a.py": [1, 2, "dd", "other"],
        f"{site}/torch/link.so": ["->", "b.so.1", None, "torch"],
    }  # fmt: skip
    (home / "manifest.json").write_text(json.dumps({"files": table}))
    monkeypatch.setattr(cache_parts.nvidia_smi, "here", lambda: False)
    asked = dict.fromkeys(("gpu", "torch_files", "triton_files", "environment_path", "instruction_set"))
    found = find(tmp_path, {**PARTS, **asked}, environment=ident)
    parts = found["parts"]
    assert parts["gpu"] == [] and parts["environment_path"] == str(home) and parts["triton_files"] == ""
    assert found["key"] == key_of(parts) and len(parts["torch_files"]) == 16
    for name, row in ((f"{site}/torch/doc.txt", "ce"), (f"{site}/other/a.py", "de")):
        changed = {**table, name: [1, 2, row, table[name][3]]}
        assert cache_parts.files_digest({"files": changed}, "torch") == parts["torch_files"]
    changed = {**table, f"{site}/torch/a.py": [1, 2, "ab", "torch"]}
    assert cache_parts.files_digest({"files": changed}, "torch") != parts["torch_files"]
    moved = {name.replace("python3.11", "python3.12"): row for name, row in table.items()}
    assert cache_parts.files_digest({"files": moved}, "torch") == parts["torch_files"]
    assert cache_parts.instruction_sets("processor : 0\nflags\t\t: fpu avx2 avx512f sse\n") == ["avx2", "avx512f"]

    def failing() -> list[str]:
        raise cache_parts.Unknown("nvidia-smi gave no answer in 10 s")

    monkeypatch.setattr(cache_parts, "gpu_names", failing)
    unknown = find(tmp_path, {**PARTS, "gpu": None})
    assert (unknown["key"], unknown["present"], unknown["why"]) == (None, None, "nvidia-smi gave no answer in 10 s")


# ---- half-written files ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> bytes:
    """A real shared library, small."""
    found = sorted(
        (path for path in Path("/usr/lib").rglob("*.so*") if path.is_file() and not path.is_symlink()),
        key=lambda path: path.stat().st_size,
    )
    for path in found:
        data = path.read_bytes()
        if data[:4] == b"\x7fELF":
            return data
    pytest.skip("no shared library here")


def test_half_written_libraries_are_swept(tmp_path: Path, library: bytes) -> None:
    def put(path: str, data: bytes, mode: int = 0o755) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
        (tmp_path / path).chmod(mode)

    kept = [
        "inductor/aa/whole.so",
        "inductor/aa/code.py",
        "inductor/aa/script",
        "triton/k/launcher.so",
        "inductor/aa/e.json",
    ]
    put(kept[0], library)
    put(kept[1], b"", 0o644)
    put(kept[2], b"#!/bin/sh\n")
    put(kept[3], library, 0o644)  # Triton's are written without the execute bit
    put(kept[4], b"", 0o644)
    steps = sorted({1, 3, 52, 63, 64, 200, len(library) // 2, len(library) - 1})
    for number in steps:
        put(f"inductor/cut/{number}.so", library[:number])
        put(f"triton/cut/{number}.so", library[:number], 0o644)
    put("inductor/bb/empty.so", b"")
    put("inductor/bb/zeros.so", bytes(len(library)))
    put("inductor/bb/unlinked.so", library, 0o644)
    put("inductor/bb/tool", library[: len(library) // 2])
    put("inductor/bb/header.h.gch", b"", 0o644)
    put("inductor/.123.456.tmp", b"x", 0o644)
    put("triton/tmp.pid_1_2/kernel.cubin", b"x", 0o644)
    put("inductor/locks/a.lock", b"", 0o644)
    swept = dict(cache_sweep.sweep(str(tmp_path)))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert len(swept) == 2 * len(steps) + 5
    assert "no execute bit" in swept["inductor/bb/unlinked.so"] and "empty" in swept["inductor/bb/empty.so"]
    assert "invalid ELF header" in swept["inductor/bb/zeros.so"]
    assert f"cut off: {len(library) - 1}" in swept[f"triton/cut/{len(library) - 1}.so"]


# ---- looking after --------------------------------------------------------------------------


def test_verify_names_every_file_that_is_wrong(tmp_path: Path) -> None:
    digest = stage(tmp_path)["digest"]
    answer = care(tmp_path, "cache_verify", key=None)
    assert answer["sound"] == 1 and answer["snapshots"][0]["files"] == len(FILES)
    files = snapshot(tmp_path, digest) / "files"
    for name, data in (("inductor/ab/kernel.py", b"short"), ("triton/ABC/kernel.cubin", b"CUBIN" * 1000)):
        (files / name).unlink()
        (files / name).write_bytes(data)
    (files / "inductor/cd/tool").unlink()
    (files / "inductor/foreign").write_text("x")
    (found,) = care(tmp_path, "cache_verify", key=KEY)["snapshots"]
    assert [path for path, _ in found["damaged"]] == ["inductor/ab/kernel.py", "triton/ABC/kernel.cubin"]
    assert "cut off" in found["damaged"][0][1] and "another content" in found["damaged"][1][1]
    assert (found["missing"], found["foreign"]) == (["inductor/cd/tool"], ["inductor/foreign"])
    (snapshot(tmp_path, digest) / "manifest.json").chmod(0o644)
    (snapshot(tmp_path, digest) / "manifest.json").write_text("{")
    assert care(tmp_path, "cache_verify", key=KEY)["snapshots"][0]["why"]
    assert cache_store.current(str(tmp_path), KEY) == digest and find(tmp_path)["present"] is None
    with pytest.raises(OpError, match="there is no compile cache"):
        care(tmp_path, "cache_verify", key="0" * 16)


def snapshots_of(root: Path, number: int) -> list[str]:
    """That many snapshots of one key, a day between two, each with 40 kB of its own; the newest is current."""
    return [
        stage(root, files, manifest=manifest_of(files, made=time.time() - 86400.0 * (number - day)))["digest"]
        for day in range(number)
        for files in [{**FILES, "inductor/own": bytes([day]) * 40_000}]
    ]


def generation(root: Path, cache: str, standing: str, recipe: str = "demo") -> None:
    run = f"r{time.monotonic_ns()}"
    gens.mark(str(root), recipe, gens.begin(str(root), recipe, {"run": run, "cache": cache}), standing, "x", None)


def test_a_collection_keeps_what_somebody_names(tmp_path: Path) -> None:
    old, good, pinned, live, newest = snapshots_of(tmp_path, 5)
    generation(tmp_path, f"{KEY}/{good}", "good")
    generation(tmp_path, f"{KEY}/{old}", "bad")
    (tmp_path / "recipes/demo/pin").write_text(json.dumps({"generation": 1, "cache": f"{KEY}/{pinned}"}))
    run = tmp_path / "runs/demo-1"
    run.mkdir(parents=True)
    state = {"phase": "training", "created": 1.0, "cache": {"key": KEY, "snapshot": live}}
    (run / "state.json").write_text(json.dumps(state))
    (run / "launch.json").write_text("{}")
    ended = tmp_path / "runs/demo-0"
    (ended / "cache/inductor").mkdir(parents=True)
    (ended / "cache/inductor/x").write_bytes(b"x" * 5000)
    (ended / "state.json").write_text(json.dumps({"phase": "failed", "created": 1.0, "exit": {"code": 1}}))
    dry = care(tmp_path, "cache_gc", older_days=0, larger_bytes=0, dry_run=True)
    assert len(cache_store.snapshots(str(tmp_path), KEY)) == 5 and (ended / "cache").exists()
    done = care(tmp_path, "cache_gc", older_days=None, larger_bytes=None, dry_run=False)
    assert [(one["digest"], one.get("name")) for one in done["removed"]] == [(None, "runs/demo-0/cache"), (old, None)]
    assert done["freed"] >= 40_000 and nothing_half(tmp_path)
    kept = {one["digest"]: " ".join(one["why"]) for one in done["kept"]}
    assert set(kept) == {good, pinned, live, newest}
    assert "generation 1 of demo is good" in kept[good] and "pinned" in kept[pinned] and "demo-1 uses it" in kept[live]
    assert {one["digest"] for one in dry["removed"]} == {None, old, newest}
    care(tmp_path, "cache_gc", older_days=0.5, larger_bytes=None, dry_run=False)
    assert set(cache_store.snapshots(str(tmp_path), KEY)) == {good, pinned, live}
    assert cache_store.current(str(tmp_path), KEY) is None
    (run / "state.json").write_text("{")
    with pytest.raises(OpError, match="what it needs is unknown"):
        care(tmp_path, "cache_gc", older_days=0, larger_bytes=0, dry_run=False)
    shown = care(tmp_path, "cache_list")
    assert "what it needs is unknown" in shown["unknown"] and len(shown["caches"][0]["snapshots"]) == 3
    assert shown["caches"][0]["snapshots"][0]["kept_by"] is None


def test_a_run_whose_runner_was_killed_holds_nothing(tmp_path: Path) -> None:
    """Nobody writes the end of one: its state says for ever that it trains."""
    used, _ = snapshots_of(tmp_path, 2)
    run = tmp_path / "runs/demo-1"
    run.mkdir(parents=True)
    dead = subprocess.Popen(["true"])
    dead.wait()
    state = {"phase": "training", "created": 1.0, "started": 1.0, "cache": {"key": KEY, "snapshot": used}}
    runner = {"pid": dead.pid, "start": 1, "boot_id": processes.boot_id()}
    (run / "state.json").write_text(json.dumps({**state, "runner": runner}))
    assert cache_store.named(str(tmp_path)) == {}
    done = care(tmp_path, "cache_gc", older_days=None, larger_bytes=None, dry_run=False)
    assert [one["digest"] for one in done["removed"]] == [used]


def test_what_somebody_put_among_caches_is_left_and_harms_nothing(tmp_path: Path) -> None:
    digest = stage(tmp_path)["digest"]
    (other := tmp_path / "other").mkdir()
    (other / "precious").write_text("x" * 5000)
    home = tmp_path / "caches" / KEY
    (home / "aside").mkdir()
    for link in (home / "aside/link", home / "snapshots" / ("a" * 16), tmp_path / "caches" / ("b" * 16)):
        link.symlink_to(other)
    (tmp_path / "caches" / ("c" * 16)).write_text("")
    (home / "aside/file").write_text("")
    assert cache_store.keys(str(tmp_path)) == [KEY] and cache_store.snapshots(str(tmp_path), KEY) == [digest]
    done = care(tmp_path, "cache_gc", older_days=None, larger_bytes=None, dry_run=False)
    assert {(one["name"], one["bytes"]) for one in done["removed"]} == {("link", 0), ("file", 0)}
    assert not list((home / "aside").iterdir()) and (other / "precious").exists()
    assert care(tmp_path, "cache_gc", older_days=None, larger_bytes=None, dry_run=True)["removed"] == []


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_snapshot_without_a_manifest_is_made_good_by_the_next_one(tmp_path: Path, text: str | None) -> None:
    digest = stage(tmp_path)["digest"]
    manifest = snapshot(tmp_path, digest) / "manifest.json"
    manifest.chmod(0o644)
    manifest.unlink() if text is None else manifest.write_text(text)
    assert find(tmp_path)["present"] is None
    assert stage(tmp_path)["how"] == "new"
    assert find(tmp_path)["present"]["digest"] == digest and care(tmp_path, "cache_verify")["sound"] == 1
    assert nothing_half(tmp_path)


def test_a_collection_by_size_takes_the_longest_unused(tmp_path: Path) -> None:
    keys = {}
    for number in range(3):
        parts = {**PARTS, "torch": str(number)}
        files = {"inductor/own": bytes([number]) * 100_000}
        stage(tmp_path, files, key=key_of(parts), parts=parts, manifest=manifest_of(files, made=100.0))
        keys[number] = key_of(parts)
    for number, at in ((0, 300.0), (1, 100.0), (2, 200.0)):
        digest = cache_store.current(str(tmp_path), keys[number])
        cache_store.used(str(tmp_path), keys[number], {"run": "r", "at": at, "snapshot": digest})
    held = cache_store.hold(
        str(snapshot(tmp_path, str(cache_store.current(str(tmp_path), keys[2])), keys[2])), shared=True
    )
    assert held is not None
    try:
        done = care(tmp_path, "cache_gc", older_days=None, larger_bytes=150_000, dry_run=False)
    finally:
        os.close(held)
    assert [one["key"] for one in done["removed"]] == [keys[1], keys[0]]  # 2 is being copied
    assert [one["why"] for one in done["kept"]] == [["a run is copying it"]] and done["bytes"] < 150_000


def test_the_list_says_what_caches_were_good_for(tmp_path: Path) -> None:
    first, second = snapshots_of(tmp_path, 2)
    generation(tmp_path, f"{KEY}/{first}", "good")
    root = str(tmp_path)
    for line in (
        {"run": "a", "at": 1.0, "cold": True, "hits": 0, "misses": 3, "rebuilt": 0, "compile_seconds": 372.0},
        {"run": "b", "recipe": "longer", "at": 2.0, "cold": False, "hits": 3, "misses": 0, "compile_seconds": 12.0},
        {"run": "c", "at": 3.0, "cold": False, "hits": 3, "misses": 0, "rebuilt": 1, "compile_seconds": 90.0},
        {"run": "d", "at": 4.0, "cold": False, "hits": None, "misses": None, "rebuilt": None, "compile_seconds": None},
    ):
        cache_store.used(root, KEY, line)
    with (tmp_path / "caches" / KEY / "uses.jsonl").open("a") as file:
        file.write("broken\n[]\n")
    cache_store.move_aside(root, KEY, second, "invalid ELF header", "c")
    (found,) = care(tmp_path, "cache_list")["caches"]
    assert (found["key"], found["parts"], found["label"], found["current"]) == (KEY, PARTS, LABEL, None)
    (one,) = found["snapshots"]
    assert one["digest"] == first and one["kept_by"] == ["generation 1 of demo is good"]
    assert found["aside"][0]["name"].startswith(second) and found["aside"][0]["why"] == "invalid ELF header"
    assert found["uses"] == {
        "runs": 4, "recipes": ["longer"], "warm": 1, "cold": 1, "hits": 6, "misses": 3, "rebuilt": 1, "last_at": 4.0,
        "last_run": "d",
        "cold_seconds": 372.0, "warm_seconds": 12.0, "saved_seconds": 360.0,
    }  # fmt: skip
    assert find(tmp_path)["present"] is None


def test_names_over_the_wire_are_held_to_their_pattern(tmp_path: Path) -> None:
    stage(tmp_path)
    for key in ("..", "../../etc", KEY + "/..", KEY[:-1], None, 5):
        for op, args in (
            (caches.cache_manifest, {"key": key, "digest": None}),
            (caches.cache_stage, {"key": key, "encoding": "plain"}),
            (cache_care.cache_verify, {"key": key}),
        ):
            if key is None and op is cache_care.cache_verify:
                continue
            with pytest.raises(OpError, match="no key"):
                op(args, Call(tmp_path, b"{}"))
    with pytest.raises(OpError, match="no digest"):
        caches.cache_manifest({"key": KEY, "digest": "../../x"}, Call(tmp_path))
    assert why_not("inductor/ab/x.py") is None
    assert make_manifest([])["digest"] == digest_of([])
    assert caches.cache_manifest({"key": KEY, "digest": None}, Call(tmp_path))["parts"] == PARTS
    assert cache_files.never_kept("inductor/locks/x.lock")
