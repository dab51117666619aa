"""Pollution in a real container, as root and by the tools that people use: named, refused, and built anew."""

from __future__ import annotations

import json
import shutil

import pytest

from orchestrator.environment.uv_tool import workstation_uv
from tests.tiny_wheels import make_wheel

PLACE = "pve/200"
ENVS = "/var/lib/orch/envs"


@pytest.fixture(scope="module")
def box(make_module_lab):
    return make_module_lab("--net", "empty", "--containers", "1", "--pct-delay", "0")


@pytest.fixture
def workstation(make_workstation, box):
    box.forget()
    station = make_workstation("first")
    box.hosts_yaml(station.directory)
    station.tiny_environment()
    station.recipe("works", environment="tiny", place=PLACE, metrics=False, command=["{python}", "-c", "import tiny"])
    make_wheel(box.share("200"), "sglang", "0.5.9")
    shutil.copy2(workstation_uv(), box.share("200") / "uv")
    return station


def inside(box, text, check=True):
    return box.run("sh", "-c", text, vmid="200", check=check)


POLLUTIONS = {
    "uv": (
        "/lab/uv pip install -q --offline --no-deps --link-mode copy --python {env}/bin/python "
        "/lab/sglang-0.5.9-py3-none-any.whl",
        "sglang 0.5.9 was installed into this environment",
    ),
    "overwrite": ("echo 'answer = 43' > {site}/tiny.py", "1 file changed in site-packages/ (tiny.py)"),
    "delete": ("rm {site}/tiny.py", "1 file missing from site-packages/ (tiny.py)"),
    "pth": (
        "echo 'import sys; sys.stray = 1' > {site}/stray.pth",
        "stray.pth was added, which every start of Python reads: import sys; sys.stray = 1",
    ),
    "sitecustomize": ("echo > {site}/sitecustomize.py", "sitecustomize.py was added, which every start of Python runs"),
    "both": (
        "/lab/uv pip install -q --offline --no-deps --link-mode copy --python {env}/bin/python "
        "/lab/sglang-0.5.9-py3-none-any.whl; echo >> {site}/tiny.py",
        "sglang 0.5.9 was installed into this environment, with 1 file changed in site-packages/ (tiny.py)",
    ),
}


@pytest.mark.parametrize("kind", POLLUTIONS)
def test_polluted_named_refused_built_anew(box, workstation, kind):
    command, named = POLLUTIONS[kind]
    built = workstation.json("env", "build", "tiny", PLACE)
    env = built["path"]
    site = inside(box, f"ls -d {env}/lib/python*/site-packages").stdout.strip()
    text = command.format(env=env, site=site)
    if built["manifest"]["protected"]["how"] == "immutable":
        inside(box, text, check=False)
        assert workstation.orch("env", "verify", PLACE).returncode == 0  # nothing got through
        inside(box, f"chattr -R -f -i {env}", check=False)
    inside(box, text)

    # The launch is what finds it, and goes on being refused.
    for _ in range(2):
        refused = workstation.orch("launch", "works", code=5)
        assert "is polluted" in refused.stderr and named in refused.stderr
        assert f"try: orch env build tiny {PLACE}" in refused.stderr
    checked = workstation.json("env", "verify", PLACE, code=1)
    (report,) = checked["places"][0]["environments"]
    assert report["id"] == built["id"] and not report["clean"] and named in report["summary"]
    assert report["findings"] and all(finding["files"] for finding in report["findings"])
    assert ".polluted-" in report["path"]
    assert named in workstation.orch("env", "verify", PLACE, "--deep", code=1).stdout

    again = workstation.json("env", "build", "tiny", PLACE)
    assert again["id"] == built["id"] and again["how"] == "built"
    assert "finished" in workstation.orch("launch", "works").stdout
    assert workstation.orch("env", "verify", PLACE, "--deep").returncode == 0
    entries = inside(box, f"ls {ENVS}").stdout.split()
    assert built["id"] in entries and any(entry.startswith(f"{built['id']}.polluted-") for entry in entries)


def test_verify_finds_it_first(box, workstation):
    """No launch has to come: the check by itself names it, and the launch after it is refused."""
    built = workstation.json("env", "build", "tiny", PLACE)
    inside(box, f"chattr -R -i {built['path']}; rm {built['path']}/lib/python*/site-packages/tiny.py")
    explained = workstation.orch("env", "verify", PLACE, "--explain").stdout
    assert "1 connection, 1 pct exec, 3 round trips" in explained
    assert "1 file missing" in workstation.orch("env", "verify", PLACE, code=1).stdout
    workstation.orch("launch", "works", code=5)
    plan = workstation.orch("plan", "works").stdout
    assert "polluted, so it would be refused" in plan


def test_runs_that_still_use_it_are_named_and_go_on(box, workstation):
    code = "import time; time.sleep(3600)"
    workstation.recipe("long", environment="tiny", place=PLACE, metrics=False, command=["{python}", "-c", code])
    workstation.orch("launch", "long", "--detach")
    (run,) = workstation.runs(PLACE)
    env = f"{ENVS}/{run['environment']}"
    inside(
        box,
        f"chattr -R -i {env}; echo >> {env}/lib/python*/site-packages/tiny.py 2>/dev/null || "
        f"for f in {env}/lib/python*/site-packages/tiny.py; do echo >> $f; done",
    )
    refused = workstation.orch("launch", "works", code=5)
    assert f"it is still used by {run['run']}" in refused.stderr
    assert inside(box, f"test -d {env}").returncode == 0
    assert workstation.json("env", "build", "tiny", PLACE)["how"] == "built"
    assert "finished" in workstation.orch("launch", "works").stdout
    assert next(one for one in workstation.runs(PLACE) if one["run"] == run["run"])["phase"] == "training"
    workstation.orch("stop", run["run"], "--kill")


def test_gc_keeps_what_is_needed(box, workstation):
    built = workstation.json("env", "build", "tiny", PLACE)
    workstation.orch("launch", "works")
    inside(box, f"cp -a {built['path']} {ENVS}/0123456789abcdef; chattr -R -f -i {ENVS}/0123456789abcdef; true")
    refused = workstation.orch("env", "gc", PLACE, code=5)
    assert f"try: orch env gc {PLACE} --yes" in refused.stderr and "bytes" in refused.stdout
    done = workstation.json("env", "gc", PLACE, "--yes")
    assert [item["entry"] for item in done["removed"]] == ["0123456789abcdef"]
    assert [item["entry"] for item in done["kept"]] == [built["id"]]
    assert inside(box, f"ls {ENVS}").stdout.split() == [built["id"]]
    listed = workstation.json("env", "list", PLACE)["places"][0]
    assert [one["entry"] for one in listed["environments"]] == [built["id"]]
    assert listed["recipes"][0]["generations"][0]["standing"] == "good"
    assert json.loads(inside(box, f"cat {ENVS}/{built['id']}/manifest.json").stdout)["files"]
