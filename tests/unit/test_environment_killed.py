"""A builder that is killed, whenever: no environment that a launch would use is left, and the next one builds it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.config.models import Host, Place
from orchestrator.environment.build import ensure, status
from orchestrator.environment.store import WheelStore
from orchestrator.place.session import Session, open_session
from tests.tiny_wheels import make_spec, make_wheel

# The operation by itself, without a server around it that could clean up after it.
BUILDER = """
import json, sys
from orchestrator.remote import environment

class Call:
    def __init__(self, root):
        self.root, self.children = root, []
    def event(self, data):
        print(data["step"], flush=True)

environment.env_build(json.load(open(sys.argv[2])), Call(sys.argv[1]))
"""


# The same, killed in the moment in which the environment has got its name.
NAMED = """
import os
from orchestrator.remote import environment_build

take_place = environment_build._take_place

def killed(*arguments):
    take_place(*arguments)
    os.kill(os.getpid(), 9)

environment_build._take_place = killed
"""


class Asked(Exception):
    """The request that would have been made."""


@pytest.fixture(scope="module")
def request_file(tmp_path_factory):
    """What a workstation asks of the place for an environment of eight packages."""
    base = tmp_path_factory.mktemp("killed")
    patch = pytest.MonkeyPatch()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        patch.delenv(name, raising=False)
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(base / "links"))
    spec = make_spec(base, [make_wheel(base / "links", f"w{n}", padding=1 << 20) for n in range(8)])
    real = Session.call

    def call(self, op, args, *rest, **more):
        if op == "env_build":
            raise Asked(json.dumps(args))
        return real(self, op, args, *rest, **more)

    patch.setattr(Session, "call", call)
    place = Place(Host(name="local", root=str(base / "root")), None)
    with open_session(place) as session, pytest.raises(Asked) as caught:
        ensure(session, spec, store=WheelStore(base / "store/wheels"))
    patch.undo()
    file = base / "request.json"
    file.write_text(str(caught.value))
    return file


def build(root, file, before=""):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", before + BUILDER, str(root), str(file)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)


def usable(root, ident):
    """What a launch would find."""
    with open_session(Place(Host(name="local", root=str(root)), None)) as session:
        return status(session, ident)


@pytest.mark.parametrize("moment", [0.05, 0.25, 0.5, 0.9])
def test_killed_at_some_moment(request_file, tmp_path, moment):
    ident = json.loads(request_file.read_text())["id"]
    with build(tmp_path, request_file) as builder:
        assert builder.stdout is not None
        builder.stdout.readline()  # it is at work
        time.sleep(moment)
        builder.send_signal(signal.SIGKILL)
    found = usable(tmp_path, ident)
    assert not found["present"] or found["checked"]["deep"] or found["checked"]["files"] > 8
    with build(tmp_path, request_file) as again:
        again.communicate(timeout=120)
    assert again.returncode == 0
    found = usable(tmp_path, ident)
    assert found["present"] and not found["polluted"]
    assert left(tmp_path) == [ident]


def left(root):
    return [entry.name for entry in (root / "envs").iterdir() if not entry.name.startswith(".")]


def test_killed_once_it_has_its_name(request_file, tmp_path):
    """Nothing of the work is left: a launch that finds the environment does not clean up beside it."""
    with build(tmp_path, request_file, NAMED) as builder:
        builder.communicate(timeout=120)
    assert builder.returncode == -signal.SIGKILL
    ident = json.loads(request_file.read_text())["id"]
    assert usable(tmp_path, ident)["present"] and left(tmp_path) == [ident]


@pytest.mark.parametrize("step", ["creating", "installing", "checking", "writing"])
def test_killed_at_each_step(request_file, tmp_path, step):
    ident = json.loads(request_file.read_text())["id"]
    with build(tmp_path, request_file) as builder:
        assert builder.stdout is not None
        for line in builder.stdout:
            if line.startswith(step):
                builder.send_signal(signal.SIGKILL)
                break
    found = usable(tmp_path, ident)
    assert not found["present"] or found["checked"]["files"] > 8
    with build(tmp_path, request_file) as again:
        again.communicate(timeout=120)
    assert again.returncode == 0 and usable(tmp_path, ident)["present"]
