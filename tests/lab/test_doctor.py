"""`orch doctor` in a real container: nothing is named where nothing is missing, and each planted fault is, with what
to do about it and nothing else beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

PLACE = "pve/200"
# Moves programs aside in a container, and back.
AWAY = 'for f in $1; do [ -e "$f" ] && mv "$f" "$f.away"; done; true'
BACK = 'for f in $1; do [ -e "$f.away" ] && mv "$f.away" "$f"; done; true'
COMPILERS = " ".join(
    f"{folder}/{name}"
    for folder in ("/usr/bin", "/usr/local/bin")
    for name in ("cc", "gcc", "clang", "c++", "g++", "clang++")
)
CONFIG = "/etc/pve/lxc/200.conf"
JOB = "vzdump: nightly\n\tschedule 21:00\n\tall 1\n\tmode stop\n\tenabled 1\n"
WRONG_DATE = '#!/bin/sh\nexec /usr/bin/date.away -d "10 minutes" "$@"\n'


@pytest.fixture(scope="module")
def box(make_module_lab):
    """A container that lacks nothing: eight GPUs with their node, and a root with room whatever this machine has."""
    lab = make_module_lab("--net", "empty", "--containers", "1", "--dead", "--pct-delay", "0")
    inside(lab, "mkdir -p /var/lib/orch && mount -t tmpfs -o size=64g tmpfs /var/lib/orch")
    inside(lab, "mount -t tmpfs -o size=2g tmpfs /dev/shm && touch /dev/nvidia-uvm")
    inside(lab, f"touch {header(lab)}")
    return lab


def inside(box, script: str, *words: str) -> str:
    return box.run("sh", "-c", script, "sh", *words, vmid="200").stdout


def header(box) -> str:
    """The header of the container's Python; its folder is made."""
    ask = "import os, sysconfig; p = sysconfig.get_paths()['include']; os.makedirs(p, exist_ok=True); print(p)"
    return box.run("/usr/bin/python3", "-IS", "-c", ask, vmid="200").stdout.strip() + "/Python.h"


@pytest.fixture
def workstation(make_workstation, box):
    station = make_workstation("desk")
    hosts = json.loads(box.hosts_yaml(station.directory).read_text())
    hosts["hosts"]["pve"]["containers"][box.dead_vmid] = {"kind": "pct"}
    station.write("hosts.yaml", json.dumps(hosts))
    return station


def bad(report) -> dict[str, dict]:
    """The rows that name something, by their check."""
    return {row["check"]: row for row in report["findings"] if row["status"] in ("fault", "warning")}


def test_nothing_is_named_where_nothing_is_missing(box, workstation, relay_of):
    relay = relay_of(box, workstation)
    calls = len(box.pct_calls())
    report = workstation.json("doctor", PLACE)
    assert report["version"] == 1 and report["place"] == PLACE and report["good"] and bad(report) == {}
    rows = {row["check"]: row for row in report["findings"]}
    # No kernel module is here whose version could be told.
    assert {name for name, row in rows.items() if row["status"] == "unknown"} <= {"driver", "index"}
    assert rows["gpus"]["text"] == "8 × NVIDIA H200" and rows["container"]["text"] == "running"
    assert relay.connections == 1 and [call.split()[0] for call in box.pct_calls()[calls:]] == ["exec"]
    shown = workstation.orch("doctor", PLACE, COLUMNS="80").stdout
    assert "a launch can work here" in shown and "FAULT" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    calls = len(box.pct_calls())
    told = workstation.orch("doctor", PLACE, "--explain").stdout
    assert "1 connection, 1 pct exec, 2 round trips" in told and "$DOCTOR_SH" in told
    assert len(box.pct_calls()) == calls


@pytest.fixture
def relay_of(make_relay):
    """A relay that counts connections, in the workstation's way to the lab."""

    def make(box, station):
        relay = make_relay(box)
        hosts = json.loads((station.directory / "hosts.yaml").read_text())
        hosts["hosts"]["pve"]["ssh"]["ssh_config"] = str(relay.config)
        station.write("hosts.yaml", json.dumps(hosts))
        return relay

    return make


@dataclass(frozen=True)
class Plant:
    """A fault: how it is made and undone (in the container, or on the host), and the one row that tells of it."""

    check: str
    status: str
    text: str
    remedy: str
    make: str
    undo: str
    words: str = ""
    on_host: bool = False


PLANTS = {
    "no-tmux": Plant(
        "tmux", "fault", "not there", f"orch exec {PLACE} -- apt-get install -y tmux", AWAY, BACK, "/usr/bin/tmux"
    ),
    "no-zstd": Plant(
        "zstd", "warning", "gzip", f"orch exec {PLACE} -- apt-get install -y zstd", AWAY, BACK, "/usr/bin/zstd"
    ),
    "no-compiler": Plant(
        "compiler",
        "warning",
        "no C and C++ compiler",
        f"orch exec {PLACE} -- apt-get install -y gcc g++",
        AWAY,
        BACK,
        COMPILERS,
    ),
    "no-headers": Plant(
        "headers",
        "warning",
        "Python.h is not there",
        f"orch exec {PLACE} -- apt-get install -y python3-dev",
        AWAY,
        BACK,
        "HEADER",
    ),
    "no-uvm": Plant(
        "uvm",
        "fault",
        "CUDA finds no GPU",
        "ssh pve pct set 200 --dev0 /dev/nvidia-uvm",
        "rm /dev/nvidia-uvm",
        "touch /dev/nvidia-uvm",
    ),
    "small-shm": Plant(
        "shm",
        "warning",
        "67.1 MB",
        f"orch exec {PLACE} -- mount -o remount,size=16G /dev/shm",
        "mount -t tmpfs -o size=64m tmpfs /dev/shm",
        "umount /dev/shm",
    ),
    "little-room": Plant(
        "disk",
        "fault",
        "no environment fits",
        f"orch env gc {PLACE}",
        "mount -t tmpfs -o size=64m tmpfs /var/lib/orch",
        "umount /var/lib/orch",
    ),
    "small-memory": Plant(
        "memory",
        "fault",
        "limit 0.1 GiB",
        "ssh pve pct set 200 --memory 32768",
        f"cp {CONFIG} /tmp/kept && sed 's/^memory:.*/memory: 128/' /tmp/kept >{CONFIG}",
        f"cat /tmp/kept >{CONFIG}",
        on_host=True,
    ),
    "lock": Plant(
        "lock",
        "warning",
        "it is locked: backup",
        "ssh pve pct unlock 200",
        f"echo 'lock: backup' >>{CONFIG}",
        f"cp {CONFIG} /tmp/locked && sed '/^lock:/d' /tmp/locked >{CONFIG}",
        on_host=True,
    ),
    "backup-job": Plant(
        "backups",
        "warning",
        "job nightly (21:00, mode stop) stops the container",
        "ssh pve pvesh set /cluster/backup/nightly --mode snapshot",
        'printf %s "$1" >/etc/pve/jobs.cfg',
        "rm /etc/pve/jobs.cfg",
        JOB,
        on_host=True,
    ),
    "wrong-clock": Plant(
        "clock",
        "warning",
        "the host is 600 s ahead of this machine",
        "ssh pve timedatectl set-ntp true",
        'mv /usr/bin/date /usr/bin/date.away && printf %s "$1" >/usr/bin/date && chmod 755 /usr/bin/date',
        "mv /usr/bin/date.away /usr/bin/date",
        WRONG_DATE,
        on_host=True,
    ),
}


@pytest.mark.parametrize("on_host", [False, True], ids=["in-the-container", "on-the-host"])
def test_planted_faults_are_named_with_their_remedies_and_nothing_else_is(box, workstation, on_host):
    """All of a side at once: each is its own row, and no row beside them may say anything."""
    plants = {name: plant for name, plant in PLANTS.items() if plant.on_host is on_host}
    header_there = header(box)

    def run(script: str, plant: Plant) -> None:
        words = header_there if plant.words == "HEADER" else plant.words
        box.run("sh", "-c", script, "sh", words, vmid=None if on_host else "200")

    for plant in plants.values():
        run(plant.make, plant)
    try:
        report = workstation.json("doctor", PLACE, code=1)
    finally:
        for plant in reversed(plants.values()):
            run(plant.undo, plant)
    found = bad(report)
    assert set(found) == {plant.check for plant in plants.values()}, report
    for plant in plants.values():
        row = found[plant.check]
        assert row["status"] == plant.status and plant.text in row["text"], row
        assert plant.remedy in row["remedy"], row


def test_a_driver_that_does_not_match_and_an_answer_that_says_nothing(box, workstation):
    scenario = box.share("200") / "gpus.json"
    kept = scenario.read_text()

    def say(fault) -> None:
        new = scenario.with_suffix(".new")
        new.write_text(json.dumps({"gpus": 8, "timeline": [{"at": 0, "fault": fault}]}))
        new.replace(scenario)

    try:
        say("mismatch")
        found = bad(workstation.json("doctor", PLACE, code=1))
        say({"text": "Segmentation fault\n", "rc": 139})
        broken = workstation.json("doctor", PLACE)
    finally:
        scenario.write_text(kept)
    assert list(found) == ["driver"] and "mismatch (library 580.159" in found["driver"]["text"]
    assert any("--no-kernel-module" in remedy for remedy in found["driver"]["remedy"])
    # It is no verdict that nvidia-smi could not be understood.
    assert bad(broken) == {}
    (row,) = [row for row in broken["findings"] if row["check"] == "gpus"]
    assert row["status"] == "unknown" and "status 139: Segmentation fault" in row["text"]


def test_a_container_that_is_stopped(box, workstation):
    place = f"pve/{box.dead_vmid}"
    calls = len(box.pct_calls())
    report = workstation.json("doctor", place, code=1)
    assert len(box.pct_calls()) == calls  # what the host says is enough
    found = bad(report)
    assert list(found) == ["container"] and found["container"]["remedy"] == [f"ssh pve pct start {box.dead_vmid}"]
    (tmux,) = [row for row in report["findings"] if row["check"] == "tmux"]
    assert tmux["status"] == "unknown" and "cannot be entered" in tmux["text"]
    shown = workstation.orch("doctor", place, code=1, COLUMNS="80").stdout
    assert f"→ ssh pve pct start {box.dead_vmid}" in shown and "a launch would fail here: 1 fault" in shown


def test_a_container_that_is_frozen_is_not_waited_for(box, workstation):
    calls = len(box.pct_calls())
    box.run("lxc-freeze", "-n", "200")
    try:
        report = workstation.json("doctor", PLACE, code=1)
    finally:
        box.run("lxc-unfreeze", "-n", "200")
    found = bad(report)
    assert list(found) == ["container"] and "frozen" in found["container"]["text"]
    assert "ssh pve lxc-unfreeze -n 200" in found["container"]["remedy"]
    assert len(box.pct_calls()) == calls


def test_no_python_and_no_room_for_any_program(box, workstation):
    pythons = "/usr/bin/python3* /usr/local/bin/python3*"
    box.run("sh", "-c", AWAY, "sh", pythons, vmid="200")
    try:
        report = workstation.json("doctor", PLACE, code=1)
    finally:
        box.run(
            "sh",
            "-c",
            'for f in /usr/bin/*.away /usr/local/bin/*.away; do [ -e "$f" ] && mv "$f" "${f%.away}"; done; true',
            vmid="200",
        )
    found = bad(report)
    assert list(found) == ["python"] and any("apt-get install -y python3" in one for one in found["python"]["remedy"])
    inside(box, "mount -t tmpfs -o size=64k tmpfs /var/lib/orch")
    try:
        full = bad(workstation.json("doctor", PLACE, code=1))
    finally:
        inside(box, "umount /var/lib/orch")
    assert list(full) == ["disk"] and "No space left" in full["disk"]["text"]
    assert f"orch exec {PLACE} -- df -h" in full["disk"]["remedy"]


def test_the_host_itself_and_what_is_no_place(workstation):
    report = workstation.json("doctor", "pve", code=None)
    rows = {row["check"]: row for row in report["findings"]}
    assert rows["python"]["status"] == "ok" and not {"container", "lock", "backups"} & set(rows)
    workstation.orch("doctor", "pve/999", code=2)
    workstation.orch("doctor", "nowhere", code=2)
