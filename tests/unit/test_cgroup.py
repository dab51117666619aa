"""Memory counters of a cgroup, in the forms that kernels and containers show them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.remote.cgroup import MemoryGroup, machine_oom_kills


def proc(tmp_path: Path, cgroup: str, mounts: str) -> str:
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mounts.replace("SYS", str(tmp_path / "sys")))
    return str(tmp_path / "proc")


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


V2 = "30 20 0:26 / SYS rw - cgroup2 cgroup2 rw\n"


def test_v2(tmp_path: Path) -> None:
    where = proc(tmp_path, "0::/user/x\n", V2)
    group(
        tmp_path / "sys/user/x",
        memory__events="low 0\nhigh 7\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n",
        memory__max="1048576\n",
        memory__current="4096\n",
    )
    found = MemoryGroup("self", where)
    assert found.oom_kills() == (2, None)
    report = found.report()
    assert (report["version"], report["limit"], report["current"]) == (2, 1048576, 4096)
    assert report["events"]["high"] == 7
    group(tmp_path / "sys/user/x", memory__max="max\n")
    assert found.report()["limit"] is None


def test_v2_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    where = proc(tmp_path, "0::/\n", V2)
    group(tmp_path / "sys", memory__events="oom_kill 5\n")
    assert MemoryGroup("self", where).oom_kills() == (5, None)


def test_v1_beside_an_empty_v2(tmp_path: Path) -> None:
    mounts = "35 31 0:32 / SYS/memory rw - cgroup cgroup rw,memory\n41 31 0:38 / SYS/unified rw - cgroup2 cgroup2 rw\n"
    where = proc(tmp_path, "9:name=systemd:/\n4:memory:/a/b\n0::/\n", mounts)
    group(
        tmp_path / "sys/memory/a/b",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__usage_in_bytes="77\n",
    )
    found = MemoryGroup("self", where)
    assert found.oom_kills() == (4, None)
    assert (found.report()["limit"], found.report()["current"]) == (None, 77)


def test_a_mount_that_shows_only_the_containers_part(tmp_path: Path) -> None:
    where = proc(tmp_path, "4:memory:/lxc/200/ns/job\n", "35 31 0:32 /lxc/200/ns SYS rw - cgroup none rw,memory\n")
    group(tmp_path / "sys/job", memory__oom_control="oom_kill 1\n")
    assert MemoryGroup("self", where).oom_kills() == (1, None)


def test_unknown_has_a_reason(tmp_path: Path) -> None:
    assert MemoryGroup("self", str(tmp_path / "none")).oom_kills() == (None, "no memory cgroup is visible")
    where = proc(tmp_path, "0::/\n", V2)
    group(tmp_path / "sys", memory__events="oom 5\n")
    found = MemoryGroup("self", where)
    kills, why = found.oom_kills()
    assert kills is None and why is not None and "does not count" in why
    (tmp_path / "sys/memory.events").unlink()
    assert found.oom_kills() == (None, "memory.events: No such file or directory")
    assert found.report()["why"] == "memory.events: No such file or directory"


def test_the_machines_count(tmp_path: Path) -> None:
    assert machine_oom_kills(str(tmp_path)) is None
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 12\nx y\n")
    assert machine_oom_kills(str(tmp_path)) == 12


def test_this_machine_answers_without_raising() -> None:
    report = MemoryGroup().report()
    assert set(report) == {"version", "limit", "current", "events", "why"}
