"""Environments built in real containers that have no network and no uv."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.environment.build import ensure, plan
from orchestrator.environment.progress import silent
from orchestrator.environment.store import WheelStore
from orchestrator.errors import ConnectionLost, OrchError
from orchestrator.place.session import open_session
from tests.lab.conftest import until
from tests.tiny_wheels import make_spec, make_wheel

ENVS = "/var/lib/orch/envs"
WIPE = f"chattr -R -i {ENVS}/*; rm -rf {ENVS}/* {ENVS}/.state"


@pytest.fixture(scope="module")
def bare():
    """Containers without network, uv, zstd and rsync."""
    from tests.lab.conftest import start, stop

    lab = start("--containers", "2", "--net", "empty", "--without", "uv,zstd,rsync", "--pct-delay", "0")
    try:
        yield lab
    finally:
        stop(lab.dir)


@pytest.fixture
def links(tmp_path, monkeypatch):
    """A folder that pip is told to look in, and nowhere else."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


@pytest.fixture
def store(tmp_path):
    return WheelStore(tmp_path / "store/wheels")


def left(lab, vmid="200"):
    """What lies in the folder of environments."""
    text = lab.run("sh", "-c", f"ls -A {ENVS} 2>/dev/null | grep -v '^[.]' || true", vmid=vmid).stdout
    return text.split()


def test_a_place_with_nothing_gets_uv_wheels_and_an_environment(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, padding=1 << 20), make_wheel(links, "other")])
    with open_session(bare.place()) as session:
        before = plan(session, spec, store)
        assert not before.present and before.to_fetch == 2 and before.bytes_to_send is None
        assert "2 wheels to fetch first" in str(before)
        built = ensure(session, spec, store=store)
        assert built.how == "built" and built.path == f"{ENVS}/{before.id}"
        assert {d["name"] for d in built.manifest["distributions"]} == {"tiny", "other"}
        assert built.manifest["torch"] is None and built.manifest["id"] == built.id
        assert [wheel["origin"] for wheel in built.manifest["wheels"]] == ["lock", "lock"]
        trips = session.round_trips
        again = ensure(session, spec, store=store)
        assert session.round_trips == trips + 1
        assert again.how == "there" and again.bytes_sent == 0 and again.manifest == built.manifest
        assert plan(session, spec, store).bytes_to_send == 0
    assert left(bare) == [built.id]
    said = bare.run(built.python, "-I", "-c", "import tiny, sys; print(tiny.VERSION, sys.prefix)", vmid="200").stdout
    assert said.split() == ["1.0", built.path]
    shared = bare.run("find", built.path, "-type", "f", "-links", "+1", vmid="200").stdout
    assert shared == ""


def test_the_plan_says_every_byte(bare, links, store, tmp_path):
    bare.forget("201")
    wheels = [make_wheel(links, padding=1 << 20), make_wheel(links, "other", padding=4096)]
    spec = make_spec(tmp_path, wheels)
    with open_session(bare.place("200")) as session:
        ensure(session, spec, store=store)  # the store has them now
    with open_session(bare.place("201")) as session:
        planned = plan(session, spec, store)
        assert planned.to_fetch == 0
        sizes = {file.name: file.size for file in planned.files}
        assert [sizes[wheel.name] for wheel in wheels] == [wheel.stat().st_size for wheel in wheels]
        assert sizes["uv"] > 1 << 20
        sent = session.bytes_sent
        assert ensure(session, spec, store=store).bytes_sent == planned.bytes_to_send == sum(sizes.values())
        assert 0 <= session.bytes_sent - sent - planned.bytes_to_send < 1 << 16
    more = make_spec(tmp_path, [*wheels, make_wheel(links, "third", padding=2048)])
    with open_session(bare.place("201")) as session:
        built = ensure(session, more, store=store)
        assert built.how == "built" and built.bytes_sent == (links / "third-1.0-py3-none-any.whl").stat().st_size


def test_two_builders_at_once_build_once(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, padding=8 << 20), make_wheel(links, "other")])
    found, told = [], []

    def build():
        with open_session(bare.place()) as session:
            found.append(ensure(session, spec, store=store, progress=lambda *words: told.append(words)))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built.how for built in found) in (["built", "waited"], ["built", "there"])
    assert found[0].manifest == found[1].manifest
    assert left(bare) == [found[0].id]


CLIENT = """
import pickle, sys
from orchestrator.environment.build import ensure
from orchestrator.environment.store import WheelStore
from orchestrator.place.session import open_session
place, spec, store = pickle.load(sys.stdin.buffer)
with open_session(place) as session:
    ensure(session, spec, store=WheelStore(store), progress=lambda *words: print(*words, flush=True))
"""


@pytest.mark.parametrize("step", ["creating", "installing", "checking", "writing"])
def test_a_killed_client_leaves_nothing_that_counts(bare, links, store, tmp_path, step):
    import pickle

    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, f"w{n}", padding=4 << 20) for n in range(8)])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as client:
        client.stdin.write(pickle.dumps((bare.place(), spec, store.root)))
        client.stdin.close()
        for line in client.stdout:
            if line.startswith(step.encode()):
                break
        client.send_signal(signal.SIGKILL)
    # Whoever asks while it goes down waits for it or builds; in the end there is one environment, and it works.
    with open_session(bare.place()) as session:
        built = ensure(session, spec, store=store)
        assert built.how in ("built", "waited", "there")
        assert len(built.manifest["distributions"]) == 8
    assert until(lambda: left(bare) == [built.id])
    assert bare.run(built.python, "-I", "-c", "import w7; print(w7.VERSION)", vmid="200").stdout == "1.0\n"


KILL_SERVERS = """
for proc in /proc/[0-9]*; do
  if tr '\\0' ' ' <$proc/cmdline 2>/dev/null | grep -q '[.]pyz serve '; then kill -9 ${proc#/proc/}; fi
done; exit 0
"""


def test_a_killed_server_leaves_nothing_that_counts(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, f"w{n}", padding=4 << 20) for n in range(8)])
    killed = []

    def kill(what, *_):
        if what == "installing" and not killed:
            killed.append(what)
            bare.run("sh", "-c", KILL_SERVERS, vmid="200")

    with open_session(bare.place()) as session, pytest.raises(ConnectionLost):
        ensure(session, spec, store=store, progress=kill)
    assert killed
    with open_session(bare.place()) as session:
        built = ensure(session, spec, store=store)
    assert built.how == "built" and left(bare) == [built.id]


def test_what_a_dead_builder_left_is_removed(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links)])
    with open_session(bare.place()) as session:
        ident = plan(session, spec, store).id
        bare.run("mkdir", "-p", f"{ENVS}/{ident}.tmp-dead/bin", f"{ENVS}/{ident}.tmp-dead.work", vmid="200")
        bare.run("sh", "-c", f"mkdir -p {ENVS}/.locks && touch {ENVS}/.locks/0123456789abcdef", vmid="200")
        bare.run("mkdir", "-p", f"{ENVS}/0123456789abcdef.tmp-dead", vmid="200")
        assert ensure(session, spec, store=store).how == "built"
    assert left(bare) == [ident]


def test_a_damaged_wheel_is_named_and_the_next_try_works(bare, links, store, tmp_path):
    bare.forget()
    wheel = make_wheel(links, padding=4096)
    spec = make_spec(tmp_path, [wheel, make_wheel(links, "other")])
    with open_session(bare.place()) as session:
        built = ensure(session, spec, store=store)
        there = bare.run("sh", "-c", f"ls /var/lib/orch/wheels/*/*/{wheel.name}", vmid="200").stdout.strip()
        bare.run("sh", "-c", f"{WIPE}; printf x | dd of={there} bs=1 seek=200 conv=notrunc", vmid="200")
        with pytest.raises(OrchError, match=f"{wheel.name} does not have the sha256 .*nothing was kept"):
            ensure(session, spec, store=store)
        assert left(bare) == []
        again = ensure(session, spec, store=store)
        assert again.how == "built" and again.id == built.id and again.bytes_sent == wheel.stat().st_size


def test_a_full_disk_is_said_and_nothing_stays(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, padding=6 << 20)])
    bare.run("sh", "-c", f"mkdir -p {ENVS} && mount -t tmpfs -o size=8m tmpfs {ENVS}", vmid="200")
    try:
        with open_session(bare.place()) as session:
            with pytest.raises(OrchError, match=r"the disk at .*/envs is full .*nothing was kept"):
                ensure(session, make_spec(tmp_path, [make_wheel(links, "big", padding=12 << 20)]), store=store)
            assert left(bare) == []
            assert ensure(session, make_spec(tmp_path, [make_wheel(links, "small")]), store=store).how == "built"
    finally:
        bare.run("umount", "-l", ENVS, vmid="200")
    with open_session(bare.place()) as session:
        assert ensure(session, spec, store=store).how == "built"


def test_a_damaged_store_is_said_and_mended(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, padding=4096)])
    with open_session(bare.place("201")) as session:
        ensure(session, spec, store=store)
    (wheel,) = store.root.rglob("*.whl")
    wheel.write_bytes(b"x" * wheel.stat().st_size)
    with open_session(bare.place("200")) as session:
        with pytest.raises(OrchError, match=r"tiny-1\.0-py3-none-any\.whl is damaged, and is removed"):
            ensure(session, spec, store=store)
        assert left(bare) == []
        assert ensure(session, spec, store=store).how == "built"


def test_progress_is_told_in_files_and_bytes(bare, links, store, tmp_path):
    bare.forget()
    spec = make_spec(tmp_path, [make_wheel(links, padding=3 << 20), make_wheel(links, "other")])
    told: list[tuple[str, int, int | None, str]] = []
    with open_session(bare.place()) as session:
        ensure(session, spec, store=store, progress=lambda *words: told.append(words))
    units = {(what.split()[0], unit) for what, _, _, unit in told}
    assert {("fetching", "wheels"), ("sending", "wheels"), ("sending", "B"), ("installing", "packages")} <= units
    assert all(total is None or 0 <= done <= total for _, done, total, _ in told)
    silent(*told[0])
