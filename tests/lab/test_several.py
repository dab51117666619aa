"""One run over two containers, each at an address of its own: together to the end, or ended together."""

from __future__ import annotations

import json
import subprocess

import pytest

from .conftest import until

PLACES = ("pve/200", "pve/201")
SECONDS = 25.0  # less than the 30 s that torchrun gives its ranks by itself

# Stands for torchrun and its ranks: two a place, each in a session of its own and deaf to SIGTERM; they meet at the
# rendezvous and take steps together, from the newest checkpoint of rank 0 on. The launcher waits long for the others
# when a rank has failed.
PROGRAM = r"""
import json, os, signal, socket, subprocess, sys, time

nodes, node = int(os.environ["ORCH_NODES"]), int(os.environ["ORCH_NODE_RANK"])
address, port = os.environ["ORCH_RENDEZVOUS"].split(":")
steps, hold = int(sys.argv[1]), sys.argv[2:] == ["hold"]

def launcher():
    ranks = []
    for local in range(2):
        marks = {"RANK": str(2 * node + local), "TORCHELASTIC_RUN_ID": "stand-in"}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **marks}, start_new_session=True))
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.terminate()
            time.sleep(30)
    return 0

def rank(number):
    signal.signal(signal.SIGTERM, lambda *_: None)
    print("rank", number, "of", os.environ["ORCH_PLACE"], os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
    others, folder, begun = [], "checkpoints", 0
    if number == 0:
        os.chdir(os.environ["ORCH_RUN_DIR"])
        os.makedirs(folder, exist_ok=True)
        begun = max([int(name[5:]) for name in os.listdir(folder)], default=0)
        listener = socket.create_server((address, int(port)), backlog=8)
        others = [listener.accept()[0] for _ in range(2 * nodes - 1)]
        for other in others:
            other.sendall(b"%8d" % begun)
    else:
        for _ in range(300):
            try:
                others = [socket.create_connection((address, int(port)))]
                break
            except OSError:
                time.sleep(0.1)
        begun = int(others[0].recv(8, socket.MSG_WAITALL))
    for step in range(begun + 1, steps + 1):
        for other in others:
            if number == 0:
                other.sendall(b"x")
            if other.recv(1) != b"x":
                raise SystemExit("a rank is gone")
            if number:
                other.sendall(b"x")
        if number == 0:
            with open(os.environ["ORCH_METRICS"], "a") as file:
                file.write(json.dumps({"step": step, "loss": 1 / step, "tokens": 8, "time": time.time()}) + "\n")
            if step % 10 == 0:
                os.mkdir(f"{folder}/step-{step:06}")
                with open(f"{folder}/step-{step:06}/state", "w") as file:
                    file.write(str(step))
        time.sleep(600 if hold and nodes > 1 and step == begun + 25 else 0.05)

sys.exit(rank(int(os.environ["RANK"])) if "RANK" in os.environ else launcher())
"""


@pytest.fixture(scope="module")
def two(make_module_lab):
    lab = make_module_lab("--net", "bridge", "--containers", "2", "--pct-delay", "0")
    for vmid in lab.vmids:
        (lab.share(vmid) / "program.py").write_text(PROGRAM)
    return lab


@pytest.fixture
def station(make_workstation, two):
    station = make_workstation("first")
    two.hosts_yaml(station.directory)
    station.tiny_environment()
    return station


def recipe(station, lab, name, steps=100000, more=(), **keys):
    command = ["{python}", "/lab/program.py", str(steps), *more]
    station.recipe(name, **{"places": lab.members(), "environment": "tiny", "command": command, **keys})


def launch(station, lab, name, **keys):
    recipe(station, lab, name, **keys)
    run = station.json("launch", name, "--detach")["run"]
    assert until(lambda: (rows(station, run)["pve/200"]["step"] or 0) > 3, 120), rows(station, run)
    return run


def rows(station, run):
    """The run at each of its places."""
    reports = station.json("status", run, code=None)["places"]
    return {report["place"]: report["runs"][0] for report in reports if report["runs"]}


def pids(lab, vmid, *marks):
    """The processes in a container whose command line or environment holds all of these."""
    script = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; tr "\\0" " " <$p/environ; echo " ${p#/proc/}"; done'
    lines = lab.run("sh", "-c", f"({script}) 2>/dev/null", vmid=vmid).stdout.splitlines()
    return [line.split()[-1] for line in lines if all(mark in line for mark in marks)]


def all_gone(lab, run):
    return not any(pids(lab, vmid, f"ORCH_RUN_ID={run}") for vmid in lab.vmids)


def ended(station, lab, run):
    """Everything of the run has ended in time; how it ended at each place."""
    assert until(lambda: all_gone(lab, run), SECONDS), [pids(lab, vmid, run) for vmid in lab.vmids]
    assert until(lambda: all(row["exit"] for row in rows(station, run).values()), 120), rows(station, run)
    return rows(station, run)


def test_to_the_end_as_one(station, two):
    recipe(station, two, "both", steps=5)
    plan = station.json("plan", "both")
    assert [step["name"] for step in plan["steps"]][2:5] == ["generation", "reach", "claim"]
    assert plan["place"] == "pve/200, pve/201"
    done = station.orch("launch", "both")
    run = rows(station, "both")["pve/200"]["run"]
    assert {place: row["phase"] for place, row in rows(station, run).items()} == dict.fromkeys(PLACES, "finished")
    assert "at pve/201: finished" in done.stdout, done.stdout
    log = station.orch("logs", run, "--place", "pve/201").stdout
    assert "rank 2 of pve/201 eth0" in log and "rank 3 of pve/201 eth0" in log
    first = station.orch("logs", run)
    assert "rank 0 of pve/200" in first.stdout and "--place pve/201" in first.stderr
    # another workstation, which knows of nothing yet, sees both places too
    assert set(rows(station, run)) == set(PLACES)
    for vmid in two.vmids:
        left = two.run("ls", f"/var/lib/orch/runs/{run}", vmid=vmid).stdout.split()
        assert not {"secrets.json", "meeting.json"} & set(left)
        assert "ORCH_RUNNERS_TOKEN" not in two.run("cat", f"/var/lib/orch/runs/{run}/launch.json", vmid=vmid).stdout


def test_an_address_that_is_not_there_and_a_way_that_is_closed(station, two):
    wrong = two.members()
    wrong[1]["address"] = "192.0.2.77"
    recipe(station, two, "wrong", places=wrong)
    refused = station.orch("launch", "wrong", "--detach", code=5)
    assert "pve/201: 192.0.2.77 is no address here" in refused.stderr and "of eth0" in refused.stderr
    two.run("ip", "route", "add", "blackhole", f"{two.info['addresses']['201']}/32", vmid="200")
    recipe(station, two, "closed")
    refused = station.orch("launch", "closed", "--detach", code=5)
    recipe(station, two, "fewer", elastic={"least": 1})
    plan = station.json("plan", "fewer")
    two.run("ip", "route", "del", "blackhole", f"{two.info['addresses']['201']}/32", vmid="200")
    assert f"pve/200 does not reach pve/201 at {two.info['addresses']['201']}, port" in refused.stderr
    assert [run for place in PLACES for run in station.runs(place) if run["recipe"] in ("wrong", "closed")] == []
    assert plan["place"] == "pve/200" and "without pve/201: pve/200 does not reach pve/201" in plan["steps"][1]["what"]


@pytest.mark.parametrize(("place", "rank"), [("pve/201", 3), ("pve/200", 0)])
def test_a_rank_that_is_killed_ends_all(station, two, place, rank):
    run = launch(station, two, f"killed{rank}")
    assert until(lambda: {row["phase"] for row in rows(station, run).values()} == {"training"}, 120)
    assert rows(station, run)["pve/201"]["step"] > 3  # told at the first place
    again = station.orch("launch", f"killed{rank}")
    assert f"{run} is training already, so nothing was started" in again.stdout
    (pid,) = pids(two, place.partition("/")[2], f" RANK={rank} ", f"ORCH_RUN_ID={run}")
    two.run("kill", "-9", pid, vmid=place.partition("/")[2])
    found = ended(station, two, run)
    said = f"rank {rank} at {place} was killed by signal 9 (SIGKILL)"
    assert [row["first"]["said"] for row in found.values()] == [said, said]
    assert [row["phase"] for row in found.values()] == ["failed", "failed"]
    (other,) = set(PLACES) - {place}
    assert f"it only followed: {said}" in found[other]["exit"]["reason"]
    whole = station.json("diagnose", run)
    assert (whole["place"], whole["cause"], whole["evidence"][0]["rank"]) == (place, "rank-died", rank), whole
    assert f"at {other}: another place of the run failed first, and this one was ended with it" in whole["notes"]
    assert station.json("diagnose", run, "--place", other)["cause"] == "other-place-failed"


def test_a_runner_that_is_killed_is_missed_and_what_became_of_its_place_is_unknown(station, two):
    run = launch(station, two, "runner")
    runner = json.loads(two.run("cat", f"/var/lib/orch/runs/{run}/state.json", vmid="201").stdout)["runner"]["pid"]
    two.run("kill", "-9", str(runner), vmid="201")
    assert until(lambda: not pids(two, "200", f"ORCH_RUN_ID={run}"), SECONDS)
    assert until(lambda: rows(station, run)["pve/200"]["exit"], 120)
    found = rows(station, run)
    assert found["pve/200"]["first"]["kind"] == "silent" and found["pve/200"]["first"]["place"] == "pve/201"
    assert found["pve/201"]["phase"] == "lost"
    assert station.json("diagnose", run, "--place", "pve/200")["cause"] == "other-place-silent"
    assert station.json("diagnose", run)["place"] == "pve/201"
    station.orch("stop", run)
    assert all_gone(two, run)


def test_a_request_to_stop_reaches_all_places(station, two):
    run = launch(station, two, "asked", stop_grace=1)
    station.orch("stop", run, "--place", "pve/201")
    found = ended(station, two, run)
    assert [row["phase"] for row in found.values()] == ["stopped", "stopped"]
    assert found["pve/200"]["first"]["said"].startswith("pve/201 was stopped by tester@")
    run = launch(station, two, "asked", stop_grace=1)
    said = station.orch("stop", run)
    assert f"{run} at pve/200 is stopped" in said.stdout and f"{run} at pve/201 is stopped" in said.stdout


def test_a_launch_that_broke_off_between_the_places_goes_on(station, two):
    recipe(station, two, "broken", steps=30)
    script = (
        "import os, signal, sys\n"
        "from orchestrator import launch, several\n"
        "def start(one):\n"
        "    if one.member.number == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return launch.start(one)\n"
        "several.STEPS = tuple((name, start if name == 'start' else step) for name, step in launch.STEPS)\n"
        "sys.argv = ['orch', 'launch', 'broken', '--detach']\n"
        "from orchestrator.cli import main; main()\n"
    )
    killed = subprocess.run(
        [station.program[0], "-c", script],
        cwd=station.directory,
        env=station.environment,
        capture_output=True,
        timeout=60,
    )
    assert killed.returncode == -9, killed
    before = rows(station, "broken")
    assert before["pve/200"]["phase"] == "preparing" and before["pve/201"]["phase"] in ("starting", "training")
    station.orch("launch", "broken")
    after = rows(station, "broken")
    assert {row["run"] for row in after.values()} == {before["pve/200"]["run"]}
    assert [row["phase"] for row in after.values()] == ["finished", "finished"]


def test_a_run_goes_on_without_a_place_that_is_lost(station, two):
    """The one that leads has the checkpoints: without it there is nothing to go on from."""
    recipe(station, two, "elastic", steps=60, more=["hold"], elastic={"least": 1})
    one = station.json("launch", "elastic", "--detach")["run"]
    assert until(lambda: rows(station, one)["pve/200"]["step"] == 25, 30.0)  # and on that it stays
    two.run("lxc-stop", "-k", "-n", "200")
    assert until(lambda: rows(station, one)["pve/201"]["exit"], 120)
    refused = station.orch("launch", "elastic", "--detach", code=5).stderr
    assert f"{one} cannot go on: pve/201 has no checkpoint of it, and pve/200" in refused
    assert "orch launch elastic --new" in refused
    two.run("pct", "start", "200")

    again = station.orch("launch", "elastic", "--detach").stdout
    assert f"from step 20 of {one}, which lost pve/200" in again, again
    other = max(row["run"] for row in rows(station, "elastic").values())
    assert until(lambda: rows(station, other)["pve/200"]["step"] == 45, 120)
    two.run("lxc-stop", "-k", "-n", "201")
    assert until(lambda: rows(station, other)["pve/200"]["exit"], 120)

    plan = station.json("plan", "elastic")
    assert plan["place"] == "pve/200" and "without pve/201: no answer" in plan["steps"][1]["what"]
    assert f"from step 40 of {other}, which lost pve/201" in plan["steps"][3]["what"]
    last = station.orch("launch", "elastic").stdout
    assert "elastic.least lets the run go on at pve/200" in last and f"from step 40 of {other}" in last, last
    found = rows(station, "elastic")["pve/200"]
    assert found["phase"] == "finished" and found["run"] not in (one, other)
    metrics = two.run("cat", f"/var/lib/orch/runs/{found['run']}/metrics.jsonl", vmid="200").stdout
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(41, 61))
    assert "a new run" in station.json("plan", "elastic")["steps"][3]["what"]  # of one that is finished
    two.run("pct", "start", "201")
