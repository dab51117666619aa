"""Facts of the place: each by itself, and versions asked for once."""

from __future__ import annotations

import time

import pytest

from orchestrator.remote import facts


@pytest.fixture
def program(tmp_path):
    def make(name, text):
        path = tmp_path / "programs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return str(path)

    return make


def test_one_fact_that_cannot_be_read_spoils_no_other(tmp_path, monkeypatch):
    def broken():
        raise OSError("no")

    for name in ("boot_id", "uptime", "libc", "memory_limit", "memory_current"):
        monkeypatch.setattr(facts, name, broken)
    found = facts.gather(str(tmp_path))
    assert found["boot_id"] is None and found["memory_limit"] is None and found["libc"] is None
    assert found["hostname"] and found["disk_free"] > 0 and found["cpus"] >= 1 and found["python"]["version"]


def test_the_root_need_not_exist(tmp_path):
    assert facts.gather(str(tmp_path / "not" / "yet"))["disk_free"] > 0
    assert not (tmp_path / "not").exists()


def test_a_version_is_asked_for_once(tmp_path, program):
    tool = program("tool", f"echo asked >>{tmp_path}/log\necho tool 1.2.3\n")
    cache = str(tmp_path / "versions.json")
    for _ in range(3):
        versions = facts.Versions(cache)
        versions.ask(tool, ["--version"])
        assert versions.answers() == {tool: "1.2.3"}
    assert (tmp_path / "log").read_text() == "asked\n"
    time.sleep(0.01)
    program("tool", f"echo asked >>{tmp_path}/log\necho tool 1.2.4 now\n")
    versions = facts.Versions(cache)
    versions.ask(tool, ["--version"])
    assert versions.answers() == {tool: "1.2.4"}


def test_a_program_that_hangs_costs_a_bounded_time(tmp_path, program, monkeypatch):
    monkeypatch.setattr(facts, "BOUND", 0.3)
    versions = facts.Versions(str(tmp_path / "versions.json"))
    hangs, broken, good = (
        program("hangs", "exec sleep 60\n"),
        program("broken", "echo 1.2; exit 3\n"),
        program("good", "echo 1.2\n"),
    )
    for tool in (hangs, broken, good):
        versions.ask(tool, [])
    start = time.monotonic()
    assert versions.answers() == {hangs: None, broken: None, good: "1.2"}
    assert time.monotonic() - start < 5


def test_a_broken_cache_is_no_obstacle(tmp_path, program):
    (tmp_path / "versions.json").write_text("{nonsense")
    versions = facts.Versions(str(tmp_path / "versions.json"))
    tool = program("tool", "echo 2.0\n")
    versions.ask(tool, [])
    assert versions.answers() == {tool: "2.0"}


def test_tools_are_found_past_path(tmp_path, program, monkeypatch):
    home = tmp_path / "home"
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to(program("tool", ""))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert facts.find_tool("tool", str(tmp_path)) == str(home / ".local/bin/tool")
    assert facts.find_tool("no-such-tool", str(tmp_path)) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "brought-0123").symlink_to(program("brought", ""))
    assert facts.find_tool("brought", str(tmp_path)) == str(tmp_path / "bin" / "brought-0123")


def test_an_interpreter_of_an_environment_is_not_offered(tmp_path, program, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("")
    (venv / "bin" / "python3").symlink_to(program("python3", ""))
    monkeypatch.setenv("PATH", str(venv / "bin"))
    assert not any(path.startswith(str(tmp_path)) for path in facts.find_pythons(str(tmp_path / "root")))


@pytest.mark.parametrize(
    ("version", "good"), [("3.8.1", True), ("3.14.0rc1", True), ("3.7.9", False), ("2.7", False), (None, False)]
)
def test_new_enough(version, good):
    assert facts.new_enough(version) is good


def test_limits_are_the_tightest_on_the_way_up(tmp_path, monkeypatch):
    for name, text in (("near", "max\n"), ("far", "1000\n"), ("root", "9223372036854771712\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(facts, "cgroup_files", lambda *_: [str(tmp_path / n) for n in ("near", "far", "root")])
    assert facts.memory_limit() == 1000
    monkeypatch.setattr(facts, "cgroup_files", lambda *_: [str(tmp_path / "near")])
    assert facts.memory_limit() is None
