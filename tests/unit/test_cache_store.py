"""Caches on the workstation: packs and their frames, the store, and how they come to a place and from it."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli import cache_commands
from orchestrator.compile_cache import pack as packs
from orchestrator.compile_cache import staging
from orchestrator.compile_cache.key import Relative
from orchestrator.compile_cache.store import Store, verify
from orchestrator.config.models import Host, Place
from orchestrator.errors import NotFound, OrchError, UsageError
from orchestrator.place.session import open_session
from orchestrator.remote import cache_files, cache_store
from tests.unit.test_cache_key import BASE

CONTENTS = st.lists(
    st.binary(max_size=2000) | st.integers(1, 5000).map(lambda size: bytes(range(256)) * (size // 16)),
    max_size=12,
    unique=True,
)
LABEL = {"recipe": "demo", "code": "c" * 16}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def pieces(data, size=700):
    return (data[start : start + size] for start in range(0, len(data), size))


def packed(path, contents):
    writer = packs.Writer(path)
    for data in contents:
        writer.add(sha256(data), len(data), pieces(data))
    return writer.finish()


def unpacked(encoding, stream):
    """What any tar reads."""
    data = b"".join(stream)
    if encoding == "zstd":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    elif encoding == "gzip":
        whole, data = data, b""
        while whole:
            decoder = zlib.decompressobj(wbits=31)
            data += decoder.decompress(whole)
            whole = decoder.unused_data
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


@settings(deadline=None, max_examples=40)
@given(CONTENTS, st.sampled_from(["zstd", "gzip", "plain"]), st.sets(st.integers(0, 11)), st.integers(1, 9000))
def test_any_choice_of_contents_is_a_tar_in_any_encoding(tmp_path_factory, contents, encoding, chosen, frame):
    path = tmp_path_factory.mktemp("pack") / "pack"
    before, packs.FRAME = packs.FRAME, frame
    try:
        pack = packed(path, contents)
    finally:
        packs.FRAME = before
    assert pack == packs.Pack.read(path, pack.to_json()) and path.stat().st_size == pack.bytes
    assert pack.raw == sum(map(len, contents))
    wanted = [data for number, data in enumerate(contents) if number in chosen]
    lacking = frozenset(map(sha256, wanted))
    assert unpacked(encoding, packs.stream(pack, lacking, encoding)) == {sha256(data): data for data in wanted}
    assert unpacked(encoding, packs.stream(pack, None, encoding)) == {sha256(data): data for data in contents}
    found = packs.members(packs.opened(encoding, iter(list(packs.stream(pack, None, encoding)))))
    assert [(name, b"".join(chunks)) for name, _, chunks in found] == [(sha256(data), data) for data in contents]
    told, exact = packs.cost(pack, None, encoding)
    sent = sum(map(len, packs.stream(pack, None, encoding)))
    assert exact == (encoding != "gzip" or not contents) and (not exact or told <= sent <= told + 1100)


def test_what_does_not_change_is_sent_as_it_lies_there(tmp_path):
    pack = packed(tmp_path / "pack", [os.urandom(3 << 20) for _ in range(4)])
    assert len(pack.frames) == 2
    *sent, _ = packs.stream(pack, None, "zstd")
    assert b"".join(sent) == pack.path.read_bytes()


@pytest.mark.parametrize(("seconds", "packed"), [(0.0, False), (0.5, True)])
def test_gzip_goes_on_only_while_the_wire_is_slower_than_packing(seconds, packed):
    """By a clock that moves by what packing a frame, and having it taken, are said to cost."""
    now = [0.0]

    def frame():
        now[0] += 0.1
        yield b"x" * 1000

    paying, levels = packs.Paying(lambda: now[0]), []
    for _ in range(4):
        levels.append(paying.level)
        for _ in paying.timed(4000, frame()):
            now[0] += seconds
    assert levels == ([1, 1, 1, 1] if packed else [1, 0, 0, 0])


def test_contents_that_are_not_what_they_are_called_are_not_packed(tmp_path):
    writer = packs.Writer(tmp_path / "pack")
    for name, size, data in ((sha256(b"abc"), 3, b"abd"), (sha256(b"abc"), 4, b"abc")):
        with pytest.raises(OrchError, match="is not that"):
            writer.add(name, size, [data])
    writer.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=50)), st.lists(st.integers(0, 60)))
def test_a_stream_of_parts_is_read_in_any_sizes(parts, sizes):
    stream = packs.Pulled(iter(parts))
    assert b"".join([*(stream.read(size) for size in sizes), stream.read()]) == b"".join(parts)


# --- the store -------------------------------------------------------------------------------------


FILES = {
    "inductor/aa/one.py": b"print(1)\n" * 200,
    "inductor/aa/one.so": bytes(range(256)) * 40,
    "inductor/bb/same.py": b"print(1)\n" * 200,
    "triton/x/kernel.cubin": b"",
}


def manifest_of(files):
    rows = [[path, len(data), sha256(data), path.endswith(".so")] for path, data in files.items()]
    about = {"from": "run-1", "parent": None, "made": 1.0, "cold_seconds": 12.0}
    return cache_files.make_manifest(rows, **about)


def stored(store, files=FILES, parts=BASE, label=LABEL):
    with store.adding(parts.digest, parts) as adding:
        for data in dict.fromkeys(files.values()):
            adding.writer.add(sha256(data), len(data), [data])
        return adding.keep(manifest_of(files), label, "pve/200")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def test_the_store_keeps_what_it_was_given(store):
    one = stored(store)
    assert store.all() == [one] == store.current() and store.find(one.key) == one == store.find(one.key, one.digest)
    assert one.parts == BASE and one.label == LABEL and one.bytes == sum(map(len, FILES.values()))
    assert verify(one).sound
    more = stored(store, {**FILES, "inductor/cc/more.py": b"2"})
    assert store.find(one.key) == more and store.all() == [more, one]
    assert staging.named(store, "demo") == more == staging.named(store, one.key[:5])
    assert staging.named(store, one.name) == one
    with pytest.raises(NotFound):
        staging.named(store, "nobody")
    store.remove(more.folder)
    assert store.all() == [one] == store.current()
    store.remove(one.folder)
    assert store.all() == [] and not list(store.root.iterdir())


KNOWN = [
    ("aa11111111111111", "d111111111111111", {"demo"}),
    ("aa22222222222222", "d222222222222222", {"long", "aa"}),
    ("aa11111111111111", "d333333333333333", {"demo", "long"}),
    ("bb11111111111111", "d444444444444444", {"None"}),
]


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("aa1", ("aa11111111111111", None)),
        ("aa11111111111111/", ("aa11111111111111", None)),
        ("aa11111111111111/d3", ("aa11111111111111", "d333333333333333")),
        ("demo", ("aa11111111111111", None)),
        ("long", ("aa22222222222222", None)),
        ("aa", ("aa22222222222222", None)),  # a recipe of that very name
        ("b", ("bb11111111111111", None)),
        ("a", UsageError),
        ("a/d2", ("aa22222222222222", "d222222222222222")),
        ("aa1/d", UsageError),
        ("", NotFound),
        ("/", NotFound),
        ("bb11111111111111/d1", NotFound),
        ("../..", NotFound),
    ],
)
def test_what_a_reference_means(reference, meant):
    if isinstance(meant, tuple):
        assert staging.meant(reference, KNOWN, "here", "orch cache list") == meant
    else:
        with pytest.raises(meant) as caught:
            staging.meant(reference, KNOWN, "here", "orch cache list")
        assert caught.value.hint == "orch cache list" and "here" in caught.value.message


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1.5GB", 1_500_000_000), (".5k", 500), ("20GiB", 20 << 30), (" 3 m ", 3_000_000), ("2Ti", 2 << 40)]
    + [(text, None) for text in ("", "1,5GB", "-1", "1e9", "5iB", "1PB", "٣GB", "nan")],
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(UsageError, match="such as 500MB"):
            cache_commands._bytes(text)
    else:
        assert cache_commands._bytes(text) == size


def test_nothing_is_left_of_what_did_not_arrive(store):
    for missing in (FILES["inductor/aa/one.so"], None):
        with pytest.raises(OrchError), store.adding(BASE.digest, BASE) as adding:
            for data in dict.fromkeys(FILES.values()):
                if data != missing:
                    adding.writer.add(sha256(data), len(data), [data])
            if missing is None:
                raise OrchError("the connection is lost")
            adding.keep(manifest_of(FILES), LABEL, "pve/200")
    assert store.all() == [] and not [path for path in (store.root / BASE.digest).iterdir() if path.is_dir()]


def test_verify_names_what_is_damaged_in_a_pack(store):
    one = stored(store)
    pack = one.folder / "pack"
    whole = pack.read_bytes()
    pack.write_bytes(whole[: len(whole) // 2])
    checked = verify(one)
    assert "inductor/aa/one.so" in checked.paths and len(checked.why) == 1, checked
    pack.write_bytes(whole)
    assert verify(one).sound
    (one.folder / "index.json").write_text("[]")
    assert not verify(one).sound


def test_what_is_damaged_is_set_aside_and_can_be_removed(store):
    one = stored(store)
    whole = (one.folder / "pack").read_bytes()
    assert one.trouble() is None and staging.damaged(one) is None
    (one.folder / "pack").write_bytes(whole[:-1])
    assert "bytes" in one.trouble() and one.again == f"orch cache pull {one.name} pve/200"
    (one.folder / "pack").write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    assert one.trouble() is None and "damaged" in staging.damaged(one)
    assert store.all() == [] == store.current() and store.find(one.key) is None
    ((key, digest, folder),) = store.unreadable()
    assert (key, digest) == (one.key, one.digest)
    again = stored(store)
    (again.folder / "about.json").write_text("{")
    assert store.all() == [] and len(store.unreadable()) == 2
    store.remove(folder)
    store.remove(again.folder)
    assert not list(store.root.iterdir())


@pytest.mark.parametrize("name", ["pack", "index.json", "manifest.json"])
@pytest.mark.parametrize("data", [None, b""])
def test_a_launch_goes_on_without_a_stored_cache_that_is_damaged(store, name, data):
    one = stored(store)
    path = one.folder / name
    path.unlink() if data is None else path.write_bytes(data)
    plan = staging.plan(found(), store, "demo")
    assert (plan.send, plan.prediction.predicted) == (None, "cold")
    assert one.name in plan.notes[0] and "not used" in plan.notes[0] and "orch cache pull" in plan.notes[0]
    pinned = staging.plan(found(), store, "demo", one.name, 3)
    assert pinned.send is None and "generation 3" in "".join(pinned.notes)
    elsewhere = staging.plan(found(parts=replace(BASE, environment_path="/a")), store, "demo")
    assert elsewhere.send is None


def test_two_that_take_the_same_snapshot_in_at_once(store):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: stored(store), range(12)))
    (one,) = store.all()
    assert verify(one).sound


# --- what a launch takes ---------------------------------------------------------------------------


def found(**more):
    given = {"why": None, "present": None, "wanted": None, "relatives": (), "last_cold": None, "snapshots": 0}
    return staging.Found(**{"parts": BASE, "programs": {}, **given, **more})


def test_what_lies_at_the_place_is_taken_before_what_lies_here(store):
    one = stored(store)
    plan = staging.plan(found(present="e" * 16), store, "demo")
    assert (plan.send, plan.prediction.snapshot, plan.prediction.predicted) == (None, "e" * 16, "warm")
    plan = staging.plan(found(), store, "demo")
    assert (plan.send, plan.prediction.snapshot, plan.prediction.predicted) == (one, one.digest, "warm")


def test_a_cache_of_another_environment_path_travels_as_the_seed(store):
    elsewhere = stored(store, parts=replace(BASE, environment_path="/a"))
    plan = staging.plan(found(), store, "demo")
    assert plan.send == elsewhere and plan.prediction.seed == elsewhere.name and plan.prediction.predicted == "rebuild"
    there = Relative(replace(BASE, environment_path="/b"), "e" * 16, same_recipe=True)
    plan = staging.plan(found(relatives=(there,)), store, "demo")
    assert plan.send is None and plan.prediction.seed == there.name


def test_a_pin_takes_exactly_its_snapshot(store):
    one = stored(store)
    want = f"{BASE.digest}/{'1' * 16}"
    there = staging.plan(found(wanted=BASE, present="e" * 16), store, "demo", want, 3)
    assert (there.prediction.snapshot, there.prediction.predicted, there.send) == ("1" * 16, "warm", None)
    here = staging.plan(found(present="e" * 16), store, "demo", one.name, 3)
    assert (here.prediction.snapshot, here.send) == (one.digest, one)
    gone = staging.plan(found(present="e" * 16), store, "demo", want, 3)
    assert gone.prediction.snapshot == "e" * 16 and "generation 3" in gone.notes[0] and "gone" in gone.notes[0]

    def wanted(**changes):
        parts = replace(BASE, **changes)
        return staging.plan(found(wanted=parts), store, "nobody", f"{parts.digest}/{'1' * 16}", 3)

    store.remove(one.folder)
    shaped = wanted(environment_path="/a")
    assert shaped.prediction.seed.endswith("1" * 16) and shaped.prediction.because == ("environment /a → (none)",)
    foreign = wanted(triton="3.6.0")
    assert foreign.prediction.seed is None and "triton 3.6.0 → 3.5.1" in foreign.notes[0]


def test_a_place_that_cannot_tell_its_gpus_has_no_prediction(store):
    plan = staging.plan(found(why="nvidia-smi gives no answer"), store, "demo")
    assert plan.prediction is None and "nvidia-smi gives no answer" in plan.notes[0]


@pytest.mark.parametrize(
    ("programs", "local", "packed", "how"),
    [
        ({"zstd": True}, False, 40, "zstd"),
        ({"zstd": True}, True, 40, "zstd"),
        ({"zstd": False}, False, 40, "gzip"),
        ({"zstd": False}, False, 99, "plain"),
        ({"zstd": False}, True, 40, "plain"),
    ],
)
def test_how_it_travels_is_what_the_place_can_and_what_pays(programs, local, packed, how):
    chosen, why = staging.encoding(programs, local=local, raw=100, packed=packed)
    assert chosen == how and why


# --- at a place ------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    with open_session(Place(Host(name="local", root=str(tmp_path / "root")), None)) as it:
        yield it


def lying(session, one):
    folder = Path(session.root, "caches", one.key, "snapshots", one.digest, "files")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "plain"])
def test_a_stored_cache_comes_to_a_place_and_the_next_one_costs_what_is_new(session, store, encoding, monkeypatch):
    monkeypatch.setattr(staging, "encoding", lambda *_, **__: (encoding, "as asked"))
    one = stored(store)
    first = staging.push(session, one)
    assert first.how == "new" and lying(session, one) == FILES
    assert staging.push(session, one).how == "there"
    more = {**FILES, "inductor/cc/more.py": b"2" * 5000}
    two = stored(store, more)
    second = staging.push(session, two)
    assert (second.how, second.contents) == ("new", 1) and second.bytes < 7000 and lying(session, two) == more
    trips = session.round_trips
    assert staging.ask(session, BASE, None, "demo").present == two.digest and session.round_trips == trips + 1


def test_a_damaged_pack_brings_nothing_to_a_place(session, store):
    one = stored(store, {**FILES, "inductor/dd/noise.so": os.urandom(100_000)})
    pack = one.folder / "pack"
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 0xFF
    pack.write_bytes(bytes(data))
    with pytest.raises(OrchError, match=r"is damaged \(.*one.so|noise.so") as caught:
        staging.push(session, one)
    assert caught.value.hint == one.again and store.all() == []
    assert staging.ask(session, BASE, None, "demo").present is None
    assert not list(Path(session.root, "caches", one.key, "snapshots").iterdir())


def test_a_cache_comes_back_as_it_was(session, store, tmp_path):
    one = stored(store)
    staging.push(session, one)
    other = Store(tmp_path / "other")
    cache_store.used(str(session.root), one.key, {"recipe": "longer", "at": 1.0})
    back, received = staging.pull(session, one.key, None, other)
    assert staging.named(other, "longer") == staging.named(other, "demo") == back
    assert (back.digest, back.parts, back.label["recipe"]) == (one.digest, BASE, "demo") and received > 0
    assert verify(back).sound and back.manifest()["files"] == one.manifest()["files"]
    assert staging.pull(session, one.key, None, other) == (back, 0)
    (back.folder / "pack").write_bytes(b"")
    again, received = staging.pull(session, one.key, None, other)
    assert received > 0 and verify(again).sound
    with pytest.raises(NotFound):
        staging.pull(session, "f" * 16, None, other)
