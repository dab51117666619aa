"""What is wrong gets one sentence, with file and line where there is one, and its exit code."""

from __future__ import annotations

import json

import pytest

GOOD = {"environment": "tiny", "command": ["sleep", "60"], "metrics": False}


@pytest.fixture
def workstation(make_workstation, lab):
    station = make_workstation("first")
    lab.hosts_yaml(station.directory)
    hosts = json.loads((station.directory / "hosts.yaml").read_text())
    hosts["hosts"]["pve"]["containers"].update({lab.dead_vmid: {}, "999": {}})
    hosts["hosts"]["gone"] = {"ssh": "root@127.0.0.1:9"}
    empty = station.directory / "no_known_hosts"
    empty.write_text("")
    known = {"host": "127.0.0.1", "port": lab.info["port"], "user": "root", "identity_file": lab.info["key"]}
    hosts["hosts"]["stranger"] = {"ssh": {**known, "known_hosts": str(empty)}, "containers": {"200": {}}}
    changed = station.directory / "changed_known_hosts"
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJTlcMBJqM5jJ0SHHGwBYBWGCeRY6Fl8RvLSlLzSyGdM"
    changed.write_text(f"[127.0.0.1]:{lab.info['port']} {other}\n")
    hosts["hosts"]["changed"] = {"ssh": {**known, "known_hosts": str(changed)}, "containers": {"200": {}}}
    station.write("hosts.yaml", json.dumps(hosts))
    station.tiny_environment()
    station.recipe("good", **GOOD)
    return station


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("nowhere", 2, ['there is no host "nowhere"']),
        ("pve/888", 2, ["888"]),
        ("pve/999", 2, ["pve has no container 999", "pct list"]),
        ("gone", 3, ["127.0.0.1 port 9 refuses the connection"]),
        ("stranger/200", 5, ["SHA256:", "orch trust stranger"]),
        ("changed/200", 5, ["changed", "SHA256:", "ssh-keygen -R", "changed_known_hosts"]),
    ],
)
def test_places(workstation, place, code, words):
    for command in (("launch", "good", "--detach"), ("status",)):
        wrong = workstation.orch(*command, "--place", place, code=code)
        said = wrong.stderr
        assert all(word in said for word in words), said
        assert len(said.strip().splitlines()) <= 6, said


def test_a_stopped_container(workstation, lab):
    wrong = workstation.orch("launch", "good", "--detach", "--place", f"pve/{lab.dead_vmid}", code=3)
    assert f"the container {lab.dead_vmid} on pve is not running" in wrong.stderr
    assert f"pct start {lab.dead_vmid}" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("command: [sleep, '1']\n", ['bad.yaml:1: the key "environment" is missing']),
        ("enviroment: tiny\n", ['bad.yaml:1: unknown key "enviroment" (did you mean "environment"?)']),
        ("environment: tiny\nstop_grace: soon\n", ["bad.yaml:2: stop_grace must be a number"]),
        ("environment: tiny\nenvironment: demo\n", ["bad.yaml:2:", "environment"]),
        ("environment: [tiny\n", ["bad.yaml:"]),
        ("environment: tiny\nsecrets: 7\nmetrics: maybe\n", ["bad.yaml:2:", "bad.yaml:3:"]),
        ("environment: timy\n", ['"timy"', 'did you mean "tiny"']),
    ],
)
def test_recipes(workstation, text, words):
    workstation.write("recipes/bad.yaml", text)
    wrong = workstation.orch("launch", "bad", "--place", "pve/200", "--detach", code=2)
    assert all(word in wrong.stderr for word in words), wrong.stderr


def test_hosts_with_all_their_problems_at_once(workstation):
    workstation.write("hosts.yaml", "hosts:\n  pve:\n    ssh: {host: pve, prot: 22}\n    contaners: {}\n")
    wrong = workstation.orch("status", code=2)
    assert 'hosts.yaml:3: unknown key "hosts.pve.ssh.prot"' in wrong.stderr or 'did you mean "port"' in wrong.stderr
    assert 'did you mean "containers"' in wrong.stderr


def test_no_tmux_there(make_lab, make_workstation):
    lab = make_lab("--net", "empty", "--without", "tmux")
    station = make_workstation("other")
    lab.hosts_yaml(station.directory)
    station.tiny_environment()
    station.recipe("good", **GOOD)
    wrong = station.orch("launch", "good", "--place", "pve/200", "--detach", code=1)
    assert "there is no tmux in pve/200" in wrong.stderr
    assert "apt-get install -y tmux" in wrong.stderr


def test_no_python_there(make_lab, make_workstation):
    lab = make_lab("--net", "empty", "--without", "python3,python3.11")
    station = make_workstation("other")
    lab.hosts_yaml(station.directory)
    station.tiny_environment()
    station.recipe("good", **GOOD)
    wrong = station.orch("launch", "good", "--place", "pve/200", "--detach", code=1)
    assert "Python" in wrong.stderr and "pve/200" in wrong.stderr
    assert station.orch("exec", "pve/200", "--", "echo", "still works").stdout == "still works\n"
