"""What is done to an environment is seen and named; what is no pollution raises no alarm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.config.models import Host, Place
from orchestrator.environment.build import ensure, plan, status
from orchestrator.environment.store import WheelStore
from orchestrator.environment.uv_tool import workstation_uv
from orchestrator.errors import Refused
from orchestrator.place.session import open_session
from orchestrator.remote import environment_files, environment_protect, environment_state, environment_verify
from tests.tiny_wheels import make_spec, make_wheel


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """One environment of two packages, built once; tests change copies of it."""
    base = tmp_path_factory.mktemp("original")
    patch = pytest.MonkeyPatch()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        patch.delenv(name, raising=False)
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(base / "links"))
    spec = make_spec(base, [make_wheel(base / "links", padding=64), make_wheel(base / "links", "other", "2.0")])
    with open_session(Place(Host(name="local", root=str(base / "root")), None)) as session:
        built = ensure(session, spec, store=WheelStore(base / "store/wheels"))
    patch.undo()
    return Path(built.path)


@pytest.fixture
def env(original, tmp_path):
    """A copy with its times, which is as good as the original."""
    copy = tmp_path / original.name
    shutil.copytree(original, copy, symlinks=True)
    assert check(copy)["clean"], check(copy)
    return copy


def check(path, deep=False):
    return environment_verify.check(str(path), environment_state.read_manifest(str(path)), deep)


def site(path):
    (found,) = path.glob("lib/python*/site-packages")
    return found


def install(path, wheel):
    """As somebody would who means well."""
    argv = [workstation_uv(), "pip", "install", "-q", "--no-deps", "--offline", "--python", str(path / "bin/python")]
    subprocess.run([*argv, str(wheel)], check=True, env={**os.environ, "UV_LINK_MODE": "copy"})


def test_a_package_that_was_installed_is_named(env, tmp_path):
    install(env, make_wheel(tmp_path / "more", "sglang", "0.5.9"))
    report = check(env)
    assert report["summary"] == "sglang 0.5.9 was installed into this environment"
    (finding,) = report["findings"]
    assert finding["count"] >= 4 and any(name.endswith("sglang/__init__.py") for name in finding["files"])


def test_very_many_are_told_in_a_few_words(env):
    for number in range(9):
        folder = site(env) / f"d{number}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: d{number}\nVersion: 1.0\n")
        (folder / "RECORD").write_text(f"d{number}-1.0.dist-info/METADATA,,\n")
    report = check(env)
    assert report["summary"].endswith("; 4 more like these") and report["summary"].count("installed") == 5
    assert len(report["findings"]) == 9


def test_what_came_with_it_is_named_too(env, tmp_path):
    install(env, make_wheel(tmp_path / "more", "sglang", "0.5.9"))
    (site(env) / "tiny/__init__.py").write_text("patched\n")
    (site(env) / "tiny/noise.bin").write_text("patched\n")
    expected = (
        "sglang 0.5.9 was installed into this environment, with 2 files changed in tiny/ (__init__.py, noise.bin)"
    )
    assert check(env)["summary"] == expected


def test_another_version_is_named(env, tmp_path):
    install(env, make_wheel(tmp_path / "more", "other", "2.1"))
    assert check(env)["summary"] == "other 2.0 was replaced by 2.1"


def test_a_package_that_was_removed_is_named(env):
    argv = [workstation_uv(), "pip", "uninstall", "-q", "--python", str(env / "bin/python"), "other"]
    subprocess.run(argv, check=True)
    assert check(env)["summary"] == "other 2.0 was removed from this environment"


@pytest.mark.parametrize(
    ("what", "summary"),
    [
        (lambda s: (s / "tiny/__init__.py").write_text("other\n"), "1 file changed in tiny/ (__init__.py)"),
        (lambda s: (s / "tiny/__init__.py").unlink(), "1 file missing from tiny/ (__init__.py)"),
        (lambda s: (s / "tiny/more.py").write_text("x"), "1 file added to tiny/, of no package (more.py)"),
        (
            lambda s: (s / "stray.pth").write_text("import os; os.x\n"),
            "SITE/stray.pth was added, which every start of Python reads: import os; os.x",
        ),
        (
            lambda s: (s / "sitecustomize.py").write_text("import x\n"),
            "SITE/sitecustomize.py was added, which every start of Python runs",
        ),
        (lambda s: (s / "stray.py").write_text("x"), "1 file added to site-packages/, of no package (stray.py)"),
        (lambda s: (s / "tiny-1.0.dist-info/RECORD").write_text(""), "1 file changed in tiny-1.0.dist-info/ (RECORD)"),
    ],
)
def test_each_kind_of_change_is_named(env, what, summary):
    what(site(env))
    assert check(env)["summary"] == summary.replace("SITE", str(site(env).relative_to(env)))


def test_the_venv_itself_counts(env):
    config = env / "pyvenv.cfg"
    config.write_text(config.read_text().replace("packages = false", "packages = true"))
    assert check(env)["summary"] == "pyvenv.cfg was changed: the system's own packages are seen too"
    python = env / "bin/python3"
    python.unlink()
    python.symlink_to("/usr/bin/true")
    assert "1 file changed in bin/ (python3)" in check(env)["summary"]


def test_only_the_deep_look_sees_content_behind_the_same_size_and_time(env):
    module = site(env) / "tiny/__init__.py"
    info = module.stat()
    module.write_text(module.read_text().replace("1.0", "6.6"))
    os.utime(module, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert check(env)["clean"]
    assert check(env, deep=True)["summary"] == "1 file changed in tiny/ (__init__.py)"


def test_another_time_alone_is_no_change(env):
    for path in site(env).rglob("*"):
        os.utime(path)
    report = check(env)
    assert report["clean"] and report["digested"] > 4


def test_what_python_compiles_by_itself_is_no_pollution(env):
    code = "import tiny, other"
    for flags in ([], ["-O"], ["-OO"]):
        subprocess.run([env / "bin/python", *flags, "-c", code], check=True, env={"PATH": "/usr/bin:/bin"})
    found = list(site(env).rglob("*.pyc"))
    assert found
    assert check(env)["clean"] and check(env, deep=True)["clean"]
    # But not whatever is put in a compiled module's place.
    found[0].write_bytes(b"\0" * 40)
    assert "was not compiled from its source" in check(env)["summary"]
    found[0].unlink()
    stray = site(env) / "tiny/__pycache__/hidden.cpython-311.pyc"
    stray.write_bytes(b"x")
    assert "hidden.cpython-311.pyc was not compiled from its source" in check(env)["summary"]


def test_the_python_it_was_built_with_has_to_be_there(env):
    manifest = environment_state.read_manifest(str(env))
    manifest["python"]["base"] = "/nowhere/python3"
    report = environment_verify.check(str(env), manifest, False)
    assert report["summary"] == "the Python it was built with, /nowhere/python3, is gone"


def test_start_files_beside_the_base_python_count(env, tmp_path):
    manifest = environment_state.read_manifest(str(env))
    manifest["python"].update(stdlib=str(tmp_path), start_files={})
    (tmp_path / "sitecustomize.py").write_text("import os\n")
    report = environment_verify.check(str(env), manifest, False)
    assert report["summary"] == f"{tmp_path}/sitecustomize.py was added, which every start of Python runs"
    manifest["python"]["start_files"] = environment_verify.start_files(str(tmp_path))
    assert environment_verify.check(str(env), manifest, False)["clean"]


def test_what_runs_do_not_see_is_a_note(env, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    minor = site(env).parent.name
    (tmp_path / f".local/lib/{minor}/site-packages/torch-2.0.dist-info").mkdir(parents=True)
    report = check(env)
    assert report["clean"]
    assert report["notes"] == [
        "PYTHONPATH is set at the place (/somewhere): runs do not see it",
        f"1 package of the user in {tmp_path}/.local/lib/{minor}/site-packages: runs do not see them",
    ]


def test_no_pip_but_a_word_of_advice(env):
    for argv in ([str(env / "bin/pip"), "install", "x"], [str(env / "bin/python"), "-m", "pip", "install", "x"]):
        said = subprocess.run(argv, capture_output=True, text=True)
        assert said.returncode == 1 and "orch env lock tiny" in said.stderr


def test_no_file_is_shared_with_anything(original):
    assert {path.lstat().st_nlink for path in original.rglob("*") if not path.is_dir()} == {1}


# --- from the workstation --------------------------------------------------------------------------


@pytest.fixture
def links(tmp_path, monkeypatch):
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


@pytest.fixture
def built(tmp_path, links):
    """A session, a spec and its environment."""
    spec = make_spec(tmp_path, [make_wheel(links), make_wheel(links, "other", "2.0")])
    store = WheelStore(tmp_path / "store/wheels")
    with open_session(Place(Host(name="local", root=str(tmp_path / "root")), None)) as session:
        yield session, spec, store, ensure(session, spec, store=store)


def test_refused_until_it_is_built_anew(built):
    session, spec, store, it = built
    path = Path(it.path)
    (site(path) / "tiny/__init__.py").write_text("patched\n")
    assert plan(session, spec, store).polluted == "1 file changed in tiny/ (__init__.py)"
    assert path.exists()  # a plan changes nothing
    for _ in range(2):
        with pytest.raises(
            Refused, match=r"is polluted: 1 file changed in tiny/ .*set aside as .*\.polluted-"
        ) as caught:
            ensure(session, spec, store=store)
        assert caught.value.hint == "orch env build tiny local"
        assert not path.exists()
    trips = session.round_trips
    again = ensure(session, spec, store=store, anew=True)
    assert again.how == "built" and again.id == it.id and session.round_trips > trips
    assert len([*path.parent.glob(f"{it.id}.polluted-*")]) == 1
    trips = session.round_trips
    assert ensure(session, spec, store=store).how == "there" and session.round_trips == trips + 1


def test_one_that_is_in_use_stays_until_the_new_one_takes_its_place(built):
    session, spec, store, it = built
    code = "import sys, time; print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([it.python, "-c", code], stdout=subprocess.PIPE) as running:
        try:
            running.stdout.readline()
            (site(Path(it.path)) / "tiny/__init__.py").write_text("patched\n")
            with pytest.raises(Refused, match=rf"still used by process {running.pid} "):
                ensure(session, spec, store=store)
            assert Path(it.path).exists()
            assert ensure(session, spec, store=store, anew=True).how == "built"
            assert (site(Path(it.path)) / "tiny/__init__.py").read_text() == 'VERSION = "1.0"\n'
        finally:
            running.kill()


def test_what_the_deep_look_found_is_remembered(built):
    session, spec, store, it = built
    module = site(Path(it.path)) / "tiny/__init__.py"
    info = module.stat()
    module.write_text(module.read_text().replace("1.0", "6.6"))
    os.utime(module, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert ensure(session, spec, store=store).how == "there"
    assert status(session, it.id, verify="deep")["polluted"]
    with pytest.raises(Refused):
        ensure(session, spec, store=store)


def test_after_a_crash_all_of_it_is_digested(built):
    session, _, _, it = built
    assert status(session, it.id)["checked"]["deep"] is False
    run = Path(session.root, "runs/demo-1")
    run.mkdir(parents=True)
    state = {"run": "demo-1", "phase": "failed", "environment": it.id, "exit": {"at": time.time() + 1}}
    (run / "state.json").write_text(json.dumps(state))
    checked = status(session, it.id)["checked"]
    assert checked["deep"] and checked["why"] == "demo-1 failed in it"
    state["exit"]["at"] = time.time() - 60
    (run / "state.json").write_text(json.dumps(state))
    assert status(session, it.id)["checked"]["deep"] is False


def test_removed_from_the_place_and_asked_for_again(built):
    session, spec, store, it = built
    shutil.rmtree(it.path)
    assert ensure(session, spec, store=store).how == "built"


# --- write protection ------------------------------------------------------------------------------


def can_protect(folder):
    probe = folder / "probe"
    probe.write_text("")
    why = environment_protect.set_immutable(str(probe), True)
    environment_protect.set_immutable(str(probe), False)
    return why is None


def test_protected_where_that_can_be(tmp_path, links):
    if not can_protect(tmp_path):
        pytest.skip("no immutable flag here")
    spec = make_spec(tmp_path, [make_wheel(links)])
    store = WheelStore(tmp_path / "store/wheels")
    root = tmp_path / "root"
    try:
        with open_session(Place(Host(name="local", root=str(root), protect=True), None)) as session:
            it = ensure(session, spec, store=store)
            assert it.manifest["protected"] == {"how": "immutable", "why": None}
            path = Path(it.path)
            for attempt in (
                lambda: (site(path) / "tiny/__init__.py").write_text("x"),
                lambda: (site(path) / "new.py").write_text("x"),
                lambda: (path / "manifest.json").unlink(),
                lambda: (path / "bin/pip").unlink(),
                lambda: path.rename(path.with_name("elsewhere")),
            ):
                with pytest.raises(PermissionError):
                    attempt()
            argv = [workstation_uv(), "pip", "install", "-q", "--offline", "--python", it.python]
            said = subprocess.run([*argv, make_wheel(tmp_path / "more", "sglang", "0.5.9")], capture_output=True)
            assert said.returncode != 0
            assert status(session, it.id, verify="deep")["present"]
            # Who takes the protection off is still found out, and the folder makes room.
            environment_protect.release(str(path))
            (site(path) / "new.py").write_text("x")
            with pytest.raises(Refused):
                ensure(session, spec, store=store)
            assert ensure(session, spec, store=store, anew=True).how == "built"
            assert environment_protect.is_immutable(it.python.replace("bin/python", "pyvenv.cfg"))
    finally:
        environment_protect.release(str(root))


def test_where_it_cannot_be_the_manifest_says_why(tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/one", "a/b/two"):
        (tmp_path / name).write_text("")
    real, tried = environment_protect.set_immutable, []

    def refuse(path, on):
        tried.append((path, on))
        return "CAP_LINUX_IMMUTABLE is missing here" if on and len(tried) > 1 else real(path, on)

    monkeypatch.setattr(environment_protect, "set_immutable", refuse)
    assert environment_protect.protect(str(tmp_path)) == {"how": "none", "why": "CAP_LINUX_IMMUTABLE is missing here"}
    assert not any(environment_protect.is_immutable(str(path)) for path in tmp_path.rglob("*"))


def test_records_are_read_whatever_is_in_them(tmp_path):
    info = tmp_path / "lib/python3.11/site-packages/odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(
        '"odd/a,b.py",sha256=AAAA,3\n../../../bin/odd,,\n../../../../outside,,\nodd/x.py,md5=1,2\n\n'
    )
    (found,) = environment_files.distributions(str(tmp_path))
    _, listed = environment_files.record(str(tmp_path), found)
    base = "lib/python3.11/site-packages/"
    assert listed == {f"{base}odd/a,b.py": "000000", "bin/odd": None, f"{base}odd/x.py": None}
    assert environment_files.record(str(tmp_path), found._replace(folder="nowhere")) == ("", {})


def test_all_of_it_in_one_sentence():
    findings = [
        {"kind": "distribution", "text": "sglang 0.5.9 was installed into this environment"},
        {"kind": "start", "text": "x.pth was added, which every start of Python reads"},
        {"kind": "changed", "text": "41 files changed in torch/"},
        {"kind": "missing", "text": "1 file missing from numpy/"},
    ]
    assert environment_verify.summary(findings) == (
        "sglang 0.5.9 was installed into this environment, with 41 files changed in torch/, 1 file missing from "
        "numpy/; x.pth was added, which every start of Python reads"
    )
    assert environment_verify.summary(findings[1:3]) == f"{findings[2]['text']}; {findings[1]['text']}"
