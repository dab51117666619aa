"""Where files come from: this machine, a folder or a mirror at the place, or the place's own index."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from orchestrator.config.models import Container
from orchestrator.environment.build import again, ensure, plan
from orchestrator.environment.store import WheelStore
from orchestrator.errors import OrchError
from orchestrator.place.session import open_session
from tests.tiny_wheels import lock_text, make_spec, make_wheel, sha256

INDEX = "http://127.0.0.1:8099/simple"
SERVE = """
ip link set lo up
cd /lab && (setsid python3 -m http.server 8099 --bind 127.0.0.1 >/dev/null 2>&1 & echo $!)
i=0; while ! python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8099))' 2>/dev/null; do
  i=$((i+1)); [ $i -lt 100 ] || exit 1; sleep 0.1
done
"""


@pytest.fixture(scope="module")
def box(make_module_lab):
    return make_module_lab("--net", "empty", "--containers", "1", "--without", "uv", "--pct-delay", "0")


@pytest.fixture
def store(tmp_path):
    return WheelStore(tmp_path / "store/wheels")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """This machine has no source at all."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def wheels(box):
    """Two packages that only the place has: in a folder, and in an index that listens there."""
    box.forget()
    box.run("sh", "-c", "rm -f /etc/uv/uv.toml", vmid="200")
    share = box.share("200")
    for old in ("wheels", "simple"):
        shutil.rmtree(share / old, ignore_errors=True)
    made = [make_wheel(share / "wheels"), make_wheel(share / "wheels", "other", "2.0")]
    for wheel in made:
        folder = share / "simple" / wheel.name.split("-")[0]
        folder.mkdir(parents=True)
        shutil.copy2(wheel, folder)
        (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return made


@pytest.fixture
def index(box, wheels):
    pid = box.run("sh", "-c", SERVE, vmid="200").stdout.split()[0]
    yield
    box.run("kill", pid, vmid="200", check=False)


def at(box, wheels):
    box.places["box"] = Container(kind="pct", id="200", wheels=wheels)
    return box.place("box")


def works(box, built):
    shared = box.run("find", built.path, "-type", "f", "-links", "+1", vmid="200").stdout
    said = box.run(built.python, "-I", "-c", "import tiny, other; print(tiny.VERSION)", vmid="200").stdout
    return said == "1.0\n" and shared == "" and built.how == "built"


def test_a_folder_there(box, wheels, offline, store, tmp_path):
    spec = make_spec(tmp_path, wheels)
    with open_session(at(box, "/lab/wheels")) as session:
        planned = plan(session, spec, store)
        assert str(planned) == f"environment {planned.id}: to build from /lab/wheels"
        built = ensure(session, spec, store=store)
        assert works(box, built) and built.manifest["source"] == {
            "kind": "folder",
            "where": "/lab/wheels",
            "backend": None,
        }
        assert not list(store.root.glob("*/*/*.whl"))


def test_a_mirror_there(box, wheels, index, offline, store, tmp_path):
    with open_session(at(box, INDEX)) as session:
        built = ensure(session, make_spec(tmp_path, wheels), store=store)
        assert works(box, built) and built.manifest["source"]["kind"] == "mirror"
        assert "127.0.0.1" not in str(built.manifest)  # an address may hold credentials


def test_the_place_downloads(box, wheels, index, offline, store, tmp_path):
    spec = make_spec(tmp_path, wheels)
    box.run("sh", "-c", f"mkdir -p /etc/uv && echo 'index-url = \"{INDEX}\"' >/etc/uv/uv.toml", vmid="200")
    with open_session(at(box, "place")) as session:
        built = ensure(session, spec, store=store)
        assert works(box, built) and built.manifest["source"]["kind"] == "index"
        # Once more by what its manifest recorded.
        box.run("sh", "-c", f"chattr -R -f -i {built.path}; echo >> {built.path}/pyvenv.cfg", vmid="200")
        with pytest.raises(OrchError, match="polluted"):
            ensure(session, spec, store=store)
        assert works(box, again(session, built.id))
    box.forget()
    with open_session(at(box, None)) as session:  # by itself: nothing is here, and the place reaches an index
        built = ensure(session, spec, store=store)
        assert works(box, built) and built.manifest["source"]["kind"] == "index"


def test_by_itself_wheels_travel_where_the_place_reaches_nothing(box, wheels, offline, store, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(box.share("200") / "wheels"))
    with open_session(at(box, None)) as session:
        built = ensure(session, make_spec(tmp_path, wheels), store=store)
        assert works(box, built) and built.manifest["source"] == {} and len(built.manifest["wheels"]) == 2


def test_a_wrong_hash_is_refused_there_too(box, wheels, index, offline, store, tmp_path):
    text = lock_text(wheels)
    text = text.replace(sha256(wheels[0]), "f" * 64)
    with open_session(at(box, INDEX)) as session:
        with pytest.raises(OrchError, match=r"installing the environment failed: .*[Hh]ash mismatch.*nothing was kept"):
            ensure(session, make_spec(tmp_path, wheels, text), store=store)
        assert box.run("ls", "/var/lib/orch/envs", vmid="200").stdout == ""


def test_what_the_lock_has_no_hash_of_is_not_taken(box, wheels, offline, store, tmp_path):
    message = r"no hash for tiny==1\.0: what is fetched could not be checked"
    with open_session(at(box, "/lab/wheels")) as session, pytest.raises(OrchError, match=message):
        ensure(session, make_spec(tmp_path, wheels, "tiny==1.0\n"), store=store)


def test_a_python_is_brought_along(box, wheels, offline, store, tmp_path, monkeypatch):
    """The place has none that fits; a standalone build lies beside the lock. Here a relocatable tree of another minor
    version stands in for one, packed as those are."""
    (tree,) = sorted(Path.home().glob(".pyenv/versions/3.12.*"))[-1:] or (None,)
    if tree is None:
        pytest.skip("there is no Python 3.12 at hand to pack")
    monkeypatch.setenv("ORCH_CACHE_DIR", str(tmp_path / "cache"))
    spec = make_spec(tmp_path, wheels).model_copy(update={"python": "==3.12.*"})
    with open_session(at(box, "/lab/wheels")) as session, pytest.raises(OrchError) as caught:
        ensure(session, spec, store=store)
    assert "needs Python ==3.12.*, and the place has" in caught.value.message
    assert "install_only.tar.gz" in caught.value.hint
    archive = tmp_path / f"pythons/cpython-{tree.name}+20240101-x86_64-unknown-linux-gnu-install_only.tar"
    archive.parent.mkdir()

    def wanted(member):
        return None if "/test/" in member.name or "__pycache__" in member.name else member

    with tarfile.open(archive, "w") as tar:
        tar.add(tree, "python", filter=lambda it: None if it.name == "python/bin/python3.12" else wanted(it))
        # Standalone builds find their library beside them; this one is told to, in the room of its old path.
        old, new = f"{tree}/lib\0".encode(), b"$ORIGIN/../lib\0"
        program = (tree / "bin/python3.12").read_bytes().replace(old, new.ljust(len(old), b"\0"))
        info = tarfile.TarInfo("python/bin/python3.12")
        info.size, info.mode = len(program), 0o755
        tar.addfile(info, io.BytesIO(program))
    with open_session(at(box, "/lab/wheels")) as session:
        assert f"Python {tree.name}" in [file.name for file in plan(session, spec, store).files]
        built = ensure(session, spec, store=store)
        assert works(box, built) and built.manifest["python"]["version"] == tree.name
        assert built.manifest["python"]["base"].startswith("/var/lib/orch/python/")
    with open_session(at(box, "/lab/wheels")) as session:
        assert ensure(session, spec, store=store).how == "there"
