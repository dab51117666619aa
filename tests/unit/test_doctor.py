"""`orch doctor`: what each check makes of the facts, and how the table is shown."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator.config.models import Host, Ssh
from orchestrator.doctor import backups
from orchestrator.doctor.checks import CHECKS, judge
from orchestrator.doctor.model import Clock, Facts, Finding, Refusal
from orchestrator.view.doctor import print_report

MIB, GIB = 1 << 20, 1 << 30
GPU = "{}, GPU-{}, 0, 143771, 0, 30, 76.50, NVIDIA H200\n"
CONFIG = ["arch: amd64", "dev0: /dev/nvidia0", "memory: 65536"]
HELLO = {
    "root": "/var/lib/orch",
    "disk_free": 500 * 10**9,
    "memory_limit": 64 * GIB,
    "python": {"path": "/usr/bin/python3", "version": "3.12.3"},
    "tools": {name: {"path": f"/usr/bin/{name}", "version": "3.4"} for name in ("tmux", "zstd")},
}
HERE: dict[str, Any] = {
    "manager": "apt-get",
    "compilers": {"c": "/usr/bin/cc", "c++": "/usr/bin/c++"},
    "headers": {"path": "/usr/include/python3.12/Python.h", "present": True},
    "shm": {"total": 32 * GIB, "free": 32 * GIB},
    "devices": ["nvidia-uvm", "nvidia0", "nvidiactl"],
    "uvm": {"opens": True, "why": None},
    "driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:37:52 UTC 2025",
    "libcuda": ["580.65.06"],
    "nvidia_smi": {"text": GPU.format(0, "a") + GPU.format(1, "b"), "rc": 0, "why": None},
    "index": True,
}
PVE = Host(name="pve", ssh=Ssh(host="pve"))
HEALTHY = Facts(
    place="pve/200",
    machine=PVE,
    kind="pct",
    ident="200",
    wheels="auto",
    host={"hostname": "pve1", "driver": "580.65.06", "config": CONFIG, "time": 1.0},
    state="RUNNING",
    pve=True,
    nodes=("nvidia0", "nvidiactl", "nvidia-uvm"),
    hello=HELLO,
    here={name: {"value": value} for name, value in HERE.items()},
    host_clock=Clock(0.1, 0.2),
    place_clock=Clock(-0.1, 0.05),
)


def here(**changed: Any) -> Facts:
    """The healthy facts but for these readings of the place; an exception's text is why one is unknown."""
    answer = dict(HEALTHY.here or {})
    for name, value in changed.items():
        answer[name] = {"why": str(value)} if isinstance(value, Exception) else {"value": value}
    return dataclasses.replace(HEALTHY, here=answer)


def hello(**changed: Any) -> Facts:
    return dataclasses.replace(HEALTHY, hello={**HELLO, **changed})


def config(*lines: str) -> Facts:
    return dataclasses.replace(HEALTHY, host={**HEALTHY.host, "config": [*CONFIG, *lines]})


def but(**changed: Any) -> Facts:
    return dataclasses.replace(HEALTHY, **changed)


def smi(text: str, rc: int = 0) -> dict[str, Any]:
    return {"text": text, "rc": rc, "why": None}


def closed(lacks: str, message: str, hint: str = "", **more: Any) -> Facts:
    return but(hello=None, here=None, refusal=Refusal(lacks, message, hint), **more)


def rows(facts: Facts) -> dict[str, Finding]:
    return {one.check: one for one in judge(facts).findings}


def test_all_is_well_with_a_healthy_place():
    report = judge(HEALTHY)
    assert [one.check for one in report.findings] == [name for name, _, _ in CHECKS]
    assert {one.status for one in report.findings} == {"ok"} and report.good
    assert not any(one.remedy for one in report.findings)


NO_GPU = {"text": None, "rc": None, "why": "nvidia-smi is not here"}
MISMATCH = smi("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n", 18)

# facts, the one row that is not well, its status, a piece of its text, a remedy (None: none is given)
CASES = {
    "stopped": (but(state="STOPPED", hello=None, here=None), "container", "fault", "not running", "pct start 200"),
    "frozen": (but(state="FROZEN", hello=None, here=None), "container", "fault", "frozen", "lxc-unfreeze -n 200"),
    "no way": (closed("way", "pct needs root", "log in as root"), "container", "fault", "needs root", "log in as root"),
    "lock": (config("lock: snapshot"), "lock", "warning", "locked: snapshot", "pct unlock 200"),
    "memory": (hello(memory_limit=200 * MIB), "memory", "fault", "0.2 GiB", "pct set 200 --memory 32768"),
    "less memory": (hello(memory_limit=4 * GIB), "memory", "warning", "4.0 GiB", "pct set 200 --memory 32768"),
    "memory said": (config("memory: 512"), "memory", "ok", "64.0 GiB", None),
    "clock": (but(place_clock=Clock(-90.0, 1.0)), "clock", "warning", "the place is 90 s behind", "timedatectl"),
    "slow answer": (but(place_clock=Clock(-90.0, 89.0)), "clock", "ok", "within 5 s", None),
    "no clock": (but(place_clock=None, host_clock=None), "clock", "unknown", "told its time", None),
    "python": (closed("python", "there is no Python", "install one"), "python", "fault", "no Python", "install one"),
    "root": (closed("root", "cannot be written: No space"), "disk", "fault", "No space", "df -h"),
    "tmux": (hello(tools={"zstd": HELLO["tools"]["zstd"]}), "tmux", "fault", "not there", "apt-get install -y tmux"),
    "zstd": (hello(tools={"tmux": HELLO["tools"]["tmux"]}), "zstd", "warning", "gzip", "apt-get install -y zstd"),
    "disk": (hello(disk_free=10**6), "disk", "fault", "1.0 MB free", "orch env gc pve/200"),
    "less disk": (hello(disk_free=5 * 10**9), "disk", "warning", "5.0 GB free", "orch env gc pve/200"),
    "disk unknown": (hello(disk_free=None), "disk", "unknown", "does not tell", None),
    "shm": (here(shm={"total": 64 * MIB, "free": 64 * MIB}), "shm", "warning", "67.1 MB", "remount,size=16G /dev/shm"),
    "full shm": (here(shm={"total": 8 * GIB, "free": 0}), "shm", "warning", "0 B free", "remount,size=16G /dev/shm"),
    "no shm": (here(shm=OSError("No such file")), "shm", "unknown", "No such file", None),
    "compiler": (
        here(compilers={"c": None, "c++": "/c"}),
        "compiler",
        "warning",
        "no C comp",
        "apt-get install -y gcc",
    ),
    "headers": (here(headers={"path": "/P.h", "present": False}), "headers", "warning", "/P.h", "python3-dev"),
    "no index": (here(index=False), "index", "ok", "wheels travel", None),
    "no uv": (here(index=OSError("no uv here yet")), "index", "unknown", "no uv", None),
    "mismatch": (here(nvidia_smi=MISMATCH), "driver", "fault", "library 580.159, kernel", "--no-kernel-module"),
    "library": (here(libcuda=["575.51.03"]), "driver", "fault", "library 575.51.03", "580.65.06.run"),
    "no library": (here(libcuda=[]), "driver", "unknown", "no libcuda.so", None),
    "no uvm": (here(uvm=None), "uvm", "fault", "finds no GPU", "ssh pve pct set 200 --dev1 /dev/nvidia-uvm"),
    "uvm refused": (
        here(uvm={"opens": False, "why": "Operation not permitted"}),
        "uvm",
        "fault",
        "not permitted",
        "pct reboot 200",
    ),
    "uvm hangs": (here(uvm={"opens": None, "why": "no answer"}), "uvm", "unknown", "no answer", None),
    "broken smi": (here(nvidia_smi=smi("Segfault", 139)), "gpus", "unknown", "status 139: Segfault", None),
    "smi hangs": (here(nvidia_smi={**NO_GPU, "why": "no answer in 5 s"}), "gpus", "unknown", "in 5 s", None),
    "no smi": (here(nvidia_smi=NO_GPU), "gpus", "warning", "no nvidia-smi", "--no-kernel-module"),
    "backups unread": (but(unread={"backups": "may not be read"}), "backups", "unknown", "may not be read", None),
    "suspend": (
        but(files={"vzdump.cron": ["0 2 * * 6 root vzdump 199 200 --mode suspend --quiet 1"]}),
        "backups",
        "warning",
        "freezes",
        "vzdump.cron",
    ),
    "snapshot": (
        but(files={"jobs.cfg": ["vzdump: a", "\tvmid 200", "\tschedule sat"]}),
        "backups",
        "ok",
        "(sat) makes a snapshot",
        None,
    ),
    "pool": (
        but(files={"jobs.cfg": ["vzdump: a", "\tpool lab", "\tmode stop"]}),
        "backups",
        "unknown",
        "takes a pool",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_fact_makes_one_finding(name):
    facts, check, status, text, remedy = CASES[name]
    found = rows(facts)
    row = found[check]
    assert row.status == status and text in row.text, row
    assert any(remedy in one for one in row.remedy) if remedy else not row.remedy, row
    others = {one.status for one in found.values() if one.check != check}
    # Where nobody could be asked inside, the other rows are unknown, as the GPUs are to a driver that does not fit:
    # they are never a verdict.
    assert others <= ({"ok", "unknown"} if facts.hello is None or name == "mismatch" else {"ok"})
    assert judge(facts).good is (status != "fault")


def test_a_place_that_has_to_download_needs_an_index():
    facts = dataclasses.replace(here(index=False), wheels="place")
    assert rows(facts)["index"].status == "fault" and "wheels: auto" in rows(facts)["index"].remedy[0]


def test_gpus_of_the_host_that_the_container_does_not_have():
    facts = here(nvidia_smi=NO_GPU, devices=[], uvm=None, libcuda=[])
    found = rows(facts)
    assert found["gpus"].status == "warning" and "this container has none" in found["gpus"].text
    assert found["uvm"].status == "ok" and found["driver"].status == "ok"
    none = dataclasses.replace(
        here(nvidia_smi=NO_GPU, devices=[], uvm=None, libcuda=[], driver=None), nodes=(), host={}
    )
    assert rows(none)["gpus"].text == "none, and no driver"


def test_the_node_is_made_on_the_host_first_where_the_host_lacks_it_too():
    facts = dataclasses.replace(here(uvm=None), nodes=("nvidia0",))
    assert rows(facts)["uvm"].remedy == (
        "ssh pve nvidia-modprobe -u -c 0",
        "ssh pve pct set 200 --dev1 /dev/nvidia-uvm",
        "ssh pve pct reboot 200",
    )


def test_a_plain_lxc_container_gets_commands_of_lxc():
    def lxc(facts: Facts) -> dict[str, Finding]:
        return rows(dataclasses.replace(facts, kind="lxc", ident="train", place="pve/train", pve=False))

    assert "lock" not in lxc(HEALTHY) and "backups" not in lxc(HEALTHY)
    assert lxc(but(state="STOPPED", hello=None, here=None))["container"].remedy == ("ssh pve lxc-start -n train",)
    assert lxc(hello(memory_limit=GIB))["memory"].remedy == ("ssh pve lxc-cgroup -n train memory.max 32G",)
    assert lxc(hello(memory_limit=None))["memory"].text == "no limit is seen"
    assert "lxc.mount.entry = /dev/nvidia-uvm " in lxc(here(uvm=None))["uvm"].remedy[-1]


def of_kind(kind: str, facts: Facts, **more: Any) -> dict[str, Finding]:
    facts = dataclasses.replace(facts, kind=kind, ident="train", place="pve/train", pve=False, **more)
    return rows(dataclasses.replace(facts, host={**facts.host, "config": facts.host.get("engine")}))


@pytest.mark.parametrize(
    ("kind", "start", "thaw", "memory", "uvm"),
    [
        (
            "docker",
            "docker start train",
            "docker unpause train",
            "docker update --memory 32g --memory-swap 32g train",
            "make the container anew with docker run --gpus all …",
        ),
        (
            "podman",
            "podman start train",
            "podman unpause train",
            "podman update --memory 32g --memory-swap 32g train",
            "make the container anew with podman run --device nvidia.com/gpu=all …",
        ),
        (
            "incus",
            "incus start train",
            "incus resume train",
            "incus config set train limits.memory 32GiB",
            "incus restart train",
        ),
    ],
)
def test_other_kinds_get_commands_of_their_tools(kind, start, thaw, memory, uvm):
    healthy = of_kind(kind, HEALTHY, toolkit=True)
    assert not {"lock", "backups"} & set(healthy) and {one.status for one in healthy.values()} == {"ok"}
    closed = {"hello": None, "here": None}
    assert of_kind(kind, but(state="STOPPED", **closed))["container"].remedy == (f"ssh pve {start}",)
    assert of_kind(kind, but(state="FROZEN", **closed))["container"].remedy == (f"ssh pve {thaw}",)
    sudo = PVE.model_copy(update={"sudo": True})
    stopped = of_kind(kind, but(state="STOPPED", machine=sudo, **closed))
    assert stopped["container"].remedy == (f"ssh -t pve sudo {start}",)
    few = of_kind(kind, hello(memory_limit=GIB))["memory"]
    assert few.status == "warning" and few.remedy == (f"ssh pve {memory}",)
    gone = of_kind(kind, here(uvm=None), toolkit=True)["uvm"]
    assert gone.status == "fault" and gone.remedy[-1].endswith(uvm)
    assert of_kind(kind, HEALTHY, unread={"state": "it did not say"}, state=None, hello=None)["container"].text == (
        "it did not say"
    )


def test_a_container_of_docker_as_it_comes():
    """64 MB of /dev/shm and no GPUs, where nobody said otherwise."""
    found = of_kind(
        "docker",
        here(shm={"total": 64 * MIB, "free": 64 * MIB}, nvidia_smi=NO_GPU, devices=[], uvm=None, libcuda=[]),
    )
    assert found["shm"].status == "warning"
    assert found["shm"].remedy == (
        "ssh pve docker exec --privileged --user 0 train mount -o remount,size=16G /dev/shm",
        "for good: make the container anew with docker run --shm-size=16g … (or --ipc=host)",
    )
    assert found["gpus"].status == "warning" and "this container has none" in found["gpus"].text
    assert found["gpus"].remedy == (
        "install NVIDIA's container toolkit (nvidia-container-toolkit) on the host",
        "make the container anew with docker run --gpus all …",
    )
    mismatch = of_kind("docker", here(libcuda=["575.51.03"]))["driver"]
    assert mismatch.status == "fault" and mismatch.remedy == ("ssh pve docker restart train",)
    restarting = of_kind("docker", but(state="restarting", hello=None, here=None))["container"]
    assert restarting.status == "fault" and restarting.remedy == ("ssh pve docker logs --tail 20 train",)


def test_the_memory_that_docker_was_told_counts_too():
    facts = but(host={**HEALTHY.host, "engine": ["Image: sha256:1", f"Memory: {4 * GIB}"]})
    assert of_kind("docker", facts)["memory"].text.startswith("limit 4.0 GiB")


def test_a_place_without_a_container_has_no_rows_about_one():
    facts = dataclasses.replace(HEALTHY, kind="none", ident="", place="pve", state=None, pve=False)
    assert not {"container", "lock", "backups"} & set(rows(facts)) and judge(facts).good
    lost = dataclasses.replace(facts, hello=None, here=None, refusal=Refusal("way", "no shell there"))
    assert rows(lost)["container"].status == "fault"


JOBS = """\
# kept by the cluster
vzdump: all
\tschedule 21:00
\tall 1
\texclude 200,201

vzdump: off
\tvmid 200
\tenabled 0

vzdump: elsewhere
\tall 1
\tnode pve2

realm-sync: x
\tvmid 200

vzdump: mine
\tvmid 100,200
\tdow sat
\tstarttime 02:00
""".splitlines()


def test_which_backup_jobs_take_a_container():
    (job,) = backups.jobs({"jobs.cfg": JOBS}, "200", "pve1")
    assert job == backups.Job("mine", "sat 02:00", "snapshot", True)
    (job,) = backups.jobs({"jobs.cfg": JOBS, "vzdump.conf": ["#x", "mode: stop"]}, "200", "pve1")
    assert job.mode == "stop"
    assert [job.ident for job in backups.jobs({"jobs.cfg": JOBS}, "300", "pve2")] == ["all", "elsewhere"]
    lines = [
        "PATH=/usr/sbin",
        "0 2 * * 6 root vzdump --all 1 --exclude 200",
        "5 1 * * * root vzdump --mode=stop --all 1",
    ]
    assert backups.jobs({"vzdump.cron": [*lines, "it's broken"]}, "200", None) == [
        backups.Job(None, "5 1 * * *", "stop", True)
    ]


@pytest.mark.parametrize("name", ["stopped", "mismatch", "lock", "memory said"])
def test_the_table_fits_a_terminal_and_remedies_stay_whole(name):
    facts = CASES[name][0]
    report = judge(facts)
    out = io.StringIO()
    print_report(Console(file=out, width=80, highlight=False, markup=False, emoji=False), report)
    lines = out.getvalue().splitlines()
    shown = [line.strip()[2:] for line in lines if line.strip().startswith("→")]
    assert shown == [remedy for one in report.findings for remedy in one.remedy]
    assert all(len(line) <= 80 for line in lines if not line.strip().startswith("→"))
    verdicts = {
        "stopped": "a launch would fail here",
        "mismatch": "a launch that needs GPUs would fail here",
        "lock": "a launch can work here",
        "memory said": "a launch can work here",
    }
    assert lines[-1].startswith(f"{verdicts[name]}: ")
