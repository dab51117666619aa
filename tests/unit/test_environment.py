"""Environments on this machine: built from the store's own files, checked, and what is said where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from orchestrator.config.models import Host, Place
from orchestrator.environment.build import ensure, plan
from orchestrator.environment.store import WheelStore
from orchestrator.errors import ConfigError, OrchError, UsageError
from orchestrator.place.session import open_session
from orchestrator.remote import environment_make, environment_state
from orchestrator.remote.frames import OpError
from tests.tiny_wheels import make_spec, make_wheel

FAKE_TORCH = """
class Matrix:
    def __matmul__(self, other): return self
    def sum(self): return 512.0
def ones(*_): return Matrix()
__version__ = "{version}"
class version: cuda = {cuda}
"""


@pytest.fixture
def links(tmp_path, monkeypatch):
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


@pytest.fixture
def store(tmp_path):
    return WheelStore(tmp_path / "store/wheels")


@pytest.fixture
def session(tmp_path):
    with open_session(Place(Host(name="local", root=str(tmp_path / "root")), None)) as it:
        yield it


def left(session):
    folder = Path(session.root, "envs")
    return (
        sorted(entry.name for entry in folder.iterdir() if entry.name not in (".locks", ".state"))
        if folder.is_dir()
        else []
    )


def test_built_from_the_stores_own_files(session, links, store, tmp_path, monkeypatch):
    # What the user has set for uv, pip and Python is not to reach the build.
    monkeypatch.setenv("UV_REQUIRE_HASHES", "nonsense")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = make_spec(tmp_path, [make_wheel(links), make_wheel(links, "other", "2.0")])
    built = ensure(session, spec, store=store)
    assert built.how == "built" and built.bytes_sent == 0 and not Path(session.root, "wheels").exists()
    assert left(session) == [built.id]
    assert not [*Path(built.path).glob("lib/python*/site-packages/pip")]
    said = subprocess.run(
        [built.python, "-I", "-c", "import tiny, other; print(tiny.VERSION, other.VERSION)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["1.0", "2.0"]
    manifest = json.loads(Path(built.path, "manifest.json").read_text())
    table = manifest.pop("files")
    assert manifest == built.manifest
    size, mtime, digest, owner = table[
        f"lib/python{'.'.join(manifest['python']['version'].split('.')[:2])}/site-packages/tiny/__init__.py"
    ]
    assert (size, owner, len(digest)) == (len('VERSION = "1.0"\n'), "tiny", 64) and mtime > 10**18
    assert manifest["name"] == "tiny" and manifest["python"]["version"] and manifest["platform"]["machine"]
    assert [(d["name"], d["version"], len(d["record"])) for d in manifest["distributions"]] == [
        ("other", "2.0", 64),
        ("tiny", "1.0", 64),
    ]
    assert plan(session, spec, store).present and ensure(session, spec, store=store).how == "there"


def test_scripts_and_files_name_the_final_folder(session, links, store, tmp_path):
    built = ensure(session, make_spec(tmp_path, [make_wheel(links)]), store=store)
    texts = [path for path in Path(built.path, "bin").iterdir() if path.is_file() and not path.is_symlink()]
    assert texts
    for path in (*texts, Path(built.path, "pyvenv.cfg")):
        assert b".tmp-" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("version", "cuda", "wrong"),
    [
        ("2.13.0+cpu", "None", ""),
        ("2.13.0+cu130", '"13.0"', "2.13.0+cu130 (CUDA 13.0)"),
        ("2.13.0+cpu", '"12.8"', "12.8"),
    ],
)
def test_torch_must_be_what_was_asked(session, links, store, tmp_path, version, cuda, wrong):
    text = FAKE_TORCH.format(version=version, cuda=cuda)
    spec = make_spec(tmp_path, [make_wheel(links, "torch", "2.13.0+cpu", module=text)])
    if not wrong:
        assert ensure(session, spec, store=store).manifest["torch"] == {"version": "2.13.0+cpu", "cuda": None}
        return
    with pytest.raises(OrchError) as caught:
        ensure(session, spec, store=store)
    assert "torch 2.13.0+cpu (CUDA none) was asked for" in caught.value.message and wrong in caught.value.message
    assert left(session) == []


def test_of_an_indexs_usual_torch_the_hash_says_which_cuda_it_is_for(session, links, store, tmp_path):
    text = FAKE_TORCH.format(version="2.13.0+cu130", cuda='"13.0"')
    spec = make_spec(tmp_path, [make_wheel(links, "torch", "2.13.0", module=text)])
    spec = spec.model_copy(update={"backend": "cu130"})
    assert ensure(session, spec, store=store).manifest["torch"] == {"version": "2.13.0+cu130", "cuda": "13.0"}


def test_a_torch_that_does_not_import_is_no_environment(session, links, store, tmp_path):
    spec = make_spec(tmp_path, [make_wheel(links, "torch", "2.13.0+cpu", module="raise ImportError('libx.so: none')")])
    with pytest.raises(
        OrchError, match=r"checking the environment failed: ImportError: libx\.so: none; nothing was kept"
    ):
        ensure(session, spec, store=store)
    assert left(session) == []


def test_lock_and_spec_must_agree(session, links, store, tmp_path):
    spec = make_spec(tmp_path, [make_wheel(links, "torch", "2.12.0+cpu")])
    with pytest.raises(ConfigError, match=r"torch 2\.12\.0\+cpu is locked, and spec\.yaml asks for 2\.13\.0"):
        ensure(session, spec, store=store)


def test_offline_with_an_empty_store(session, store, tmp_path, links, monkeypatch):
    spec = make_spec(tmp_path, [make_wheel(links)])
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "https://127.0.0.1:9/simple")
    assert plan(session, spec, store).to_fetch == 1
    with pytest.raises(OrchError) as caught:
        ensure(session, spec, store=store)
    assert caught.value.exit_code == 1 and "cannot be reached" in caught.value.message
    assert caught.value.message.count("\n") == 0 and left(session) == []


def test_what_is_no_environment_under_a_name_is_put_aside(session, links, store, tmp_path):
    spec = make_spec(tmp_path, [make_wheel(links)])
    ident = plan(session, spec, store).id
    Path(session.root, "envs", ident, "bin").mkdir(parents=True)
    built = ensure(session, spec, store=store)
    assert built.how == "built" and built.id == ident
    aside = [name for name in left(session) if name != ident]
    assert len(aside) == 1 and aside[0].startswith(f"{ident}.polluted-")


def test_ids_are_checked_at_the_place(session):
    for ident in ("../../etc", "", None, "0" * 15, "0" * 16 + "\n"):
        with pytest.raises(UsageError, match="not the id"):
            session.call("env_status", {"id": ident})
    assert session.call("env_status", {"id": "0" * 16}).data["present"] is False


def test_waiting_is_told_and_ends_when_the_holder_dies(tmp_path):
    class Call:
        root = str(tmp_path)
        told: list[dict[str, object]] = []  # noqa: RUF012

        def event(self, data):
            self.told.append(data)

    path = tmp_path / "envs" / ("0" * 16)
    (tmp_path / "envs/.locks").mkdir(parents=True)
    held, waited = environment_state.lock(str(path), Call())
    assert not waited
    threading.Timer(0.8, os.close, [held]).start()
    again, waited = environment_state.lock(str(path), Call())
    os.close(again)
    assert waited and Call.told[0]["step"] == "waiting for another builder" and len(Call.told) >= 2


def test_a_full_disk_is_named():
    error = environment_make.named(OSError(28, "No space left on device"), "/somewhere/envs/x")
    assert isinstance(error, OpError) and "the disk at /somewhere/envs is full" in error.message
    assert "permitted" in environment_make.named(OSError(1, "Operation not permitted"), "/x").message
