"""Plans for places that are not at hand: what would travel to another machine, and which Python would come along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.config.models import Container, Host, Place, Ssh
from orchestrator.environment.build import plan
from orchestrator.environment.python_archive import at_hand
from orchestrator.environment.store import WheelStore
from orchestrator.errors import OrchError
from orchestrator.place.session import Hello, Reply
from tests.tiny_wheels import lock_text, make_spec, make_wheel


def far(container):
    return Place(Host(name="far", ssh=Ssh(host="far"), containers={"9": container}), "9")


@dataclass
class Scripted:
    """A session whose place is what the test says, and has nothing."""

    hello: Hello
    root: str = "/var/lib/orch"
    asked: list[str] = field(default_factory=list)
    place: Place = field(default_factory=lambda: far(Container(kind="pct", id="9")))

    def call(self, op: str, args: dict[str, Any], **_: Any) -> Reply:
        self.asked.append(op)
        if op == "env_status":
            return Reply(
                {"present": False, "polluted": None, "path": f"{self.root}/envs/{args['id']}", "manifest": None}
            )
        assert op == "have"
        return Reply({"paths": []})


def hello(machine="aarch64", python="3.11.2", libc=("glibc", "2.36")):
    own = {"path": "/usr/bin/python3", "version": python}
    return Hello(
        {},
        {
            "machine": machine,
            "system": "Linux",
            "libc": list(libc),
            "kernel": "6.1",
            "python": own,
            "pythons": [own],
            "tools": {},
        },
    )


@pytest.fixture(autouse=True)
def nothing_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv-pythons"))


def test_aarch64_is_planned(tmp_path):
    wheels = [
        make_wheel(tmp_path / "links"),
        make_wheel(tmp_path / "links", "native", tag="cp311-cp311-manylinux_2_28_aarch64"),
    ]
    store = WheelStore(tmp_path / "store/wheels")
    spec = make_spec(tmp_path, wheels)
    session = Scripted(hello())
    before = plan(session, spec, store)  # type: ignore[arg-type]
    assert str(before.target) == "CPython 3.11 on Linux aarch64 (glibc 2.36)"
    assert before.to_fetch == 3 and {file.name for file in before.files} == {"tiny==1.0", "native==1.0", "uv"}
    assert "wheels to fetch first" in str(before)
    with store.workspace() as folder:
        for wheel in wheels:
            copy = folder / wheel.name
            copy.write_bytes(wheel.read_bytes())
            store.add(copy)
    after = plan(session, spec, store)  # type: ignore[arg-type]
    assert {file.name for file in after.files} == {wheels[0].name, wheels[1].name, "uv"}
    assert after.id == before.id and after.to_fetch == 1  # uv for that machine
    other = plan(Scripted(hello(machine="x86_64")), spec, store)  # type: ignore[arg-type]
    assert other.id != after.id and "native==1.0" in {file.name for file in other.files}
    assert set(session.asked) == {"env_status", "have"}


def test_a_python_that_is_at_hand_is_planned(tmp_path):
    spec = make_spec(tmp_path, [make_wheel(tmp_path / "links")]).model_copy(update={"python": "==3.12.*"})
    session = Scripted(hello())
    with pytest.raises(OrchError, match=r"needs Python ==3\.12\.\*, and the place has 3\.11\.2"):
        plan(session, spec, WheelStore(tmp_path / "store/wheels"))  # type: ignore[arg-type]
    folder = tmp_path / "cache/pythons"
    folder.mkdir(parents=True)
    for name in (
        "cpython-3.12.8+20250106-aarch64-unknown-linux-gnu-install_only.tar.gz",
        "cpython-3.12.9+20250206-aarch64-unknown-linux-gnu-install_only_stripped.tar.gz",
        "cpython-3.12.10+20250406-aarch64-unknown-linux-musl-install_only.tar.gz",
        "cpython-3.12.11+20250706-x86_64-unknown-linux-gnu-install_only.tar.gz",
        "cpython-3.13.1+20250106-aarch64-unknown-linux-gnu-install_only.tar.gz",
        "notes.txt",
    ):
        (folder / name).write_text("")
    found = at_hand(spec, session.hello)
    assert found is not None and found.version == "3.12.9"
    planned = plan(session, spec, WheelStore(tmp_path / "store/wheels"))  # type: ignore[arg-type]
    assert planned.target.python_version == "3.12.9"
    assert planned.target.python_path == f"/var/lib/orch/{found.remote}/bin/python3.12"
    assert "Python 3.12.9" in {file.name for file in planned.files}
    assert "files to fetch or pack first" in str(planned)


def test_a_source_that_hosts_yaml_names_needs_no_wheels(tmp_path):
    spec = make_spec(tmp_path, [make_wheel(tmp_path / "links")])
    session = Scripted(hello(), place=far(Container(kind="pct", id="9", wheels="/srv/wheels")))
    planned = plan(session, spec, WheelStore(tmp_path / "store/wheels"))  # type: ignore[arg-type]
    assert str(planned) == f"environment {planned.id}: to build from /srv/wheels"
    assert {file.name for file in planned.files} == {"uv"}


def test_a_lock_that_cannot_be_built_from_is_planned_as_refused(tmp_path):
    wheels = [make_wheel(tmp_path / "links")]
    store = WheelStore(tmp_path / "store/wheels")
    whole = lock_text(wheels)
    incomplete = make_spec(tmp_path, wheels, whole + "#     unlisted: the CUDA libraries that torch requires\n")
    refused = plan(Scripted(hello()), incomplete, store).refused  # type: ignore[arg-type]
    assert refused is not None and "does not list the CUDA libraries that torch requires" in refused.message
    assert refused.hint == "orch env lock tiny, where one can be reached"
    bare = make_spec(tmp_path, wheels, "tiny==1.0\n")
    refused = plan(Scripted(hello()), bare, store).refused  # type: ignore[arg-type]
    assert refused is not None and "no hash for tiny==1.0" in refused.message
    may = bare.model_copy(update={"allow_unhashed": True})
    assert plan(Scripted(hello()), may, store).refused is None  # type: ignore[arg-type]
    assert plan(Scripted(hello()), make_spec(tmp_path, wheels), store).refused is None  # type: ignore[arg-type]
