"""Provoked for real, in containers over SSH: what each end is called, and on what evidence."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from orchestrator.environment.uv_tool import workstation_uv
from tests.tiny_wheels import make_wheel

from .conftest import until

PLACE = "pve/200"


@pytest.fixture
def workstation(make_workstation, lab):
    station = make_workstation("first")
    lab.hosts_yaml(station.directory)
    station.tiny_environment()
    return station


def launch(station, name, code, *, place=PLACE, exit_code=1, **keys):
    """Launch a program given as Python's text, follow it, and diagnose it: (the run's diagnosis, what launch said)."""
    keys = {"metrics": False, "sample_seconds": 0.3, "stop_grace": 1, **keys}
    station.recipe(name, environment="tiny", command=["{python}", "-u", "-c", code], **keys)
    done = station.orch("launch", name, "--place", place, code=exit_code)
    return station.json("diagnose", name, "--place", place), done.stdout


def test_an_uncaught_exception(workstation):
    code = "print('step 1')\nrows = {'tokens': 1}\nrows['anchors']"
    said, shown = launch(workstation, "uncaught", code)
    assert said["cause"] == "uncaught-exception" and said["confidence"] == "high"
    assert "KeyError: 'anchors'" in said["traceback"] and said["retry"] is False
    assert [item["witness"] for item in said["evidence"]] == ["log", "exit record"]
    assert "cause: uncaught-exception" in shown and "KeyError: 'anchors'" in shown
    status = workstation.orch("status", "uncaught").stdout
    assert "cause: uncaught-exception" in status
    logs = workstation.orch("logs", "uncaught")
    assert "cause: uncaught-exception" in logs.stderr and "cause:" not in logs.stdout
    (place,) = workstation.json("status", "uncaught")["places"]
    assert place["runs"][0]["diagnosis"]["cause"] == "uncaught-exception"


def test_sigkill_without_a_witness_is_no_out_of_memory(workstation):
    code = "import os, signal; print('step 1'); os.kill(os.getpid(), signal.SIGKILL)"
    said, shown = launch(workstation, "sigkill", code)
    assert said["cause"] == "killed", said
    assert "cause: killed" in shown


def test_a_run_that_goes_well_is_healthy(workstation):
    code = "print('RuntimeError: CUDA out of memory, says row 7'); print('done')"
    said, shown = launch(workstation, "well", code, exit_code=0)
    assert said["cause"] == "healthy" and "cause:" not in shown


def test_a_full_disk(workstation, lab):
    lab.run("sh", "-c", "mkdir -p /srv/full && mount -t tmpfs -o size=2m tmpfs /srv/full", vmid="200")
    try:
        code = "f = open('/srv/full/step.pt', 'wb', buffering=0)\nwhile True: f.write(bytes(100_000))"
        said, _ = launch(workstation, "full", code)
    finally:
        lab.run("umount", "-l", "/srv/full", vmid="200")
    assert said["cause"] == "disk-full", said


def test_nan(workstation):
    code = (
        "import json, os, time\n"
        "with open(os.environ['ORCH_METRICS'], 'a') as f:\n"
        "    for step in range(1, 30):\n"
        "        loss = 2 / step if step < 20 else float('nan')\n"
        "        f.write(json.dumps({'step': step, 'loss': loss, 'tokens': 10, 'time': time.time()}) + '\\n')\n"
        "        f.flush(); time.sleep(0.01)\n"
        "raise SystemExit('giving up')\n"
    )
    said, _ = launch(workstation, "nan", code, metrics=True)
    assert said["cause"] == "nan-loss" and "from step 20 on" in said["evidence"][0]["text"], said


def test_a_port_in_use(workstation):
    code = "import socket\nheld = socket.create_server(('127.0.0.1', 0))\nsocket.create_server(held.getsockname())\n"
    said, _ = launch(workstation, "port", code)
    assert said["cause"] == "port-in-use" and said["retry"] is True


def scenario(lab, vmid, content):
    folder = lab.share(vmid)
    (folder / "gpus.new").write_text(json.dumps(content))
    (folder / "gpus.new").rename(folder / "gpus.json")


@pytest.fixture
def healthy_gpus(lab):
    before = (lab.share("200") / "gpus.json").read_text()
    yield
    (lab.share("200") / "gpus.json").write_text(before)


@pytest.mark.parametrize(("fault", "cause"), [("mismatch", "driver-mismatch"), ("lost", "gpu-off-bus")])
def test_a_driver_mismatch_and_a_lost_gpu(workstation, lab, healthy_gpus, fault, cause):
    scenario(lab, "200", {"gpus": 2, "timeline": [{"at": 0, "fault": fault}]})
    code = "import time; print('step 1'); time.sleep(1); raise RuntimeError('CUDA error: unknown error')"
    said, shown = launch(workstation, f"gpu-{fault}", code)
    assert said["cause"] == cause, said
    assert "nvidia-smi" in said["witnesses"] and f"cause: {cause}" in shown


def test_a_broken_card_is_not_blamed_for_a_program_s_own_fault(workstation, lab, healthy_gpus):
    scenario(lab, "200", {"gpus": 2, "timeline": [{"at": 0, "fault": "mismatch"}]})
    said, _ = launch(workstation, "own-fault", "{}['rows']")
    assert said["cause"] == "uncaught-exception"


SITE = "$(ls -d /var/lib/orch/envs/[0-9a-f]*/lib/python*/site-packages)"
POLLUTIONS = {
    "removed": (f"rm {SITE}/tiny.py", "1 file missing from site-packages/ (tiny.py)"),
    "overwritten": (f"echo '{{}}[42]' > {SITE}/tiny.py", "1 file changed in site-packages/ (tiny.py)"),
    "installed": (
        f"/lab/uv pip install -q --offline --no-deps --link-mode copy --python {SITE}/../../../bin/python "
        "/lab/sglang-0.5.9-py3-none-any.whl; echo > {site}/tiny.py".replace("{site}", SITE),
        "sglang 0.5.9 was installed into this environment",
    ),
}


@pytest.fixture
def own_environment(workstation, lab):
    """Built for one test, and gone after it."""
    lab.forget()
    yield workstation
    lab.forget()


def polluted_meanwhile(station, lab, name, pollute, code):
    """A run that waits, an environment that is changed past its protection, and a run that goes on."""
    lab.run("rm", "-f", "/tmp/go", vmid="200")
    wait = "import os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.05)\n"
    station.recipe(name, environment="tiny", command=["{python}", "-u", "-c", wait + code], metrics=False, stop_grace=1)
    station.orch("launch", name, "--place", PLACE, "--detach")
    lab.run("sh", "-c", f"chattr -R -f -i /var/lib/orch/envs; {pollute}; touch /tmp/go", vmid="200")
    assert until(lambda: station.runs(PLACE)[0]["phase"] == "failed", 120)
    return station.json("diagnose", name, "--place", PLACE)


@pytest.mark.parametrize("kind", POLLUTIONS)
def test_an_environment_that_is_polluted_meanwhile(own_environment, lab, kind):
    make_wheel(lab.share("200"), "sglang", "0.5.9")
    shutil.copy2(workstation_uv(), lab.share("200") / "uv")
    pollute, named = POLLUTIONS[kind]
    said = polluted_meanwhile(own_environment, lab, kind, pollute, "import tiny; tiny.answer")
    assert said["cause"] == "environment-drift" and said["confidence"] == "high", said
    assert named in [item["text"] for item in said["evidence"] if item["witness"] == "environment"], said
    assert said["traceback"] and "orch rollback-env" in said["command"]
    # it stays said, also when another environment has its name by then
    own_environment.orch("launch", kind, "--place", PLACE, "--new", code=5)
    own_environment.orch("env", "build", "tiny", PLACE)
    assert own_environment.json("diagnose", said["run"], "--place", PLACE)["cause"] == "environment-drift"


def test_a_polluted_environment_is_a_witness_alone_where_something_else_is_named(own_environment, lab):
    said = polluted_meanwhile(own_environment, lab, "other", f"rm {SITE}/tiny.py", "{}['rows']")
    assert said["cause"] == "uncaught-exception", said
    assert any("1 file missing from site-packages/ (tiny.py)" in note for note in said["notes"]), said


def test_an_environment_that_is_changed_after_the_end_is_not_blamed(own_environment, lab):
    said, _ = launch(own_environment, "absent", "import absent")
    assert said["cause"] == "import-error"
    time.sleep(0.1)
    lab.run("sh", "-c", f"chattr -R -f -i /var/lib/orch/envs; echo > {SITE}/absent.py; rm {SITE}/tiny.py", vmid="200")
    said = own_environment.json("diagnose", "absent", "--place", PLACE)
    assert said["cause"] == "import-error", said
    assert any("its environment was changed since" in note for note in said["notes"])


def test_one_rank_of_two_dies(workstation):
    code = (
        "import os, signal, subprocess, sys, time\n"
        "def rank(n):\n"
        "    text = 'import os, signal, time; time.sleep(0.5 + %d * 9); os.kill(os.getpid(), signal.SIGKILL)' % n\n"
        "    return subprocess.Popen([sys.executable, '-c', text])\n"
        "ranks = [rank(0), rank(1)]\n"
        "code = ranks[0].wait()\n"
        "print('E0101 00:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: %d) '\n"
        "      'local_rank: 0 (pid: %d) of binary: python' % (code, ranks[0].pid), flush=True)\n"
        "ranks[1].terminate()\n"
        "sys.exit(1)\n"
    )
    said, _ = launch(workstation, "rank", code)
    assert said["cause"] == "rank-died", said
    assert "exitcode: -9" in said["evidence"][0]["text"]


def background(station, name, place=PLACE):
    station.recipe(name, environment="tiny", command=["sleep", "300"], metrics=False, stop_grace=1)
    station.orch("launch", name, "--place", place, "--detach")
    return next(run["run"] for run in station.runs(place) if run["recipe"] == name)


def test_a_tmux_server_that_is_killed(workstation, lab):
    run = background(workstation, "terminal")
    assert workstation.json("diagnose", run)["cause"] == "healthy"
    lab.run("tmux", "-L", f"orch-{run}", "kill-server", vmid="200")
    said = workstation.json("diagnose", run)
    assert said["cause"] == "tmux-gone" and said["phase"] == "training", said
    workstation.orch("stop", run, "--kill")
    assert workstation.json("diagnose", run)["cause"] == "stopped"


def test_a_runner_that_is_killed(workstation, lab):
    run = background(workstation, "runner")
    (state,) = [found for found in workstation.runs(PLACE) if found["run"] == run]
    text = lab.run("cat", f"/var/lib/orch/runs/{run}/state.json", vmid="200").stdout
    lab.run("kill", "-9", str(json.loads(text)["runner"]["pid"]), vmid="200")
    time.sleep(0.5)
    said = workstation.json("diagnose", run)
    assert said["cause"] == "runner-killed" and said["phase"] == "lost", (state, said)
    workstation.orch("stop", run, "--kill")


def test_a_container_stopped_under_a_run_and_started_again(make_lab, make_workstation):
    own = make_lab("--containers", "1", "--net", "empty", "--pct-delay", "0")
    station = make_workstation("first")
    own.hosts_yaml(station.directory)
    station.tiny_environment()
    run = background(station, "gone")
    own.run("lxc-stop", "-k", "-n", "200")
    said = station.json("diagnose", run)
    assert said["cause"] == "container-stopped" and "pct start 200" in said["command"], said
    own.run("pct", "start", "200")
    said = {}

    def restarted():
        said.update(station.json("diagnose", run, code=None))
        return said["cause"] == "container-restarted"

    assert until(restarted, 120), (said["cause"], said["evidence"], said["notes"])


def test_the_memory_limit_of_a_container(make_lab, make_workstation):
    own = make_lab("--containers", "1", "--net", "empty", "--memory", "300", "--pct-delay", "0")
    station = make_workstation("first")
    own.hosts_yaml(station.directory)
    station.tiny_environment()
    code = "rows = []\nwhile True: rows.append(bytearray(20_000_000)); print(len(rows))"
    said, shown = launch(station, "greedy", code)
    assert said["cause"] == "container-memory", said
    assert "cause: container-memory" in shown
