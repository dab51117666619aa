"""The scripts of the greeting, under every POSIX shell of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from orchestrator.place.greeting import Greeting, script
from orchestrator.remote import zipapp

SHELLS = [[path] for name in ("dash", "bash", "mksh", "ksh") if (path := shutil.which(name))]
SHELLS += [[path, "sh"] for name in ("busybox",) if (path := shutil.which(name))]


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def shell(request):
    return request.param


def run(argv, stdin=b"", **env):
    done = subprocess.run(
        argv, input=stdin, capture_output=True, env={"PATH": "/usr/bin:/bin", **env}, check=False, timeout=30
    )
    greet = Greeting("n0")
    greet.feed(done.stdout)
    return greet, done


def enter(shell, root, stdin=b"", digest="0" * 64, size=5, python=sys.executable, **env):
    words = ["orch-enter", "n0", digest, str(size), str(root), python]
    return run([*shell, "-c", script("enter"), *words], stdin, **env)


def test_the_host_says_what_it_knows_and_hands_over(shell):
    words = ["orch-host", "n0", "none", "none", "-", "--", "printf", "%s|", "a b", "$c"]
    greet, done = run([*shell, "-c", script("host"), *words])
    facts = greet.host_facts()
    assert facts["hostname"] and facts["kernel"] and facts["boot_id"]
    assert facts["time"] > 1e9 and facts["uptime"] > 0 and facts["config"] is None
    assert done.stdout.endswith(b"a b|$c|") and done.stderr == b""


def test_the_status_of_the_way_in_is_passed_on(shell):
    words = ["orch-host", "n0", "none", "none", "-", "--", "sh", "-c", "exit 9"]
    greet, done = run([*shell, "-c", script("host"), *words])
    assert done.returncode == 9 and greet.lines


def test_the_program_is_asked_for_and_not_a_byte_more_is_taken(shell, tmp_path):
    app, digest = zipapp.build()
    greet, done = enter(shell, tmp_path / "root", app + b"\0\0\0\1\0\0\0\0{", digest, len(app))
    assert greet.first("need") == str(len(app)) and greet.serving
    assert greet.first("enter.root") == str(tmp_path / "root")
    # The rest came to the server, which cannot read it as a frame and takes it for the end.
    assert b"is not JSON" in done.stderr
    greet, _ = enter(shell, tmp_path / "root", b"", digest, len(app))
    assert greet.serving and greet.first("need") is None


def test_a_damaged_program_is_refused(shell, tmp_path):
    greet, _ = enter(shell, tmp_path / "root", b"hello")
    assert "arrived damaged" in greet.error
    assert not (tmp_path / "root").exists()


def test_a_client_that_goes_leaves_nothing(shell, tmp_path):
    greet, done = enter(shell, tmp_path / "root", b"hel")
    assert greet.error is None and not greet.serving and done.returncode == 0
    assert not (tmp_path / "root").exists()


def test_without_python_the_shell_answers(shell, tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho False 3.6.8 /usr/bin/python3\n")
    old.chmod(0o755)
    greet, _ = enter(shell, tmp_path / "root", python=str(old))
    assert greet.no_python and greet.first("python.seen").split() == ["3.6.8"]
    assert greet.first("python.given") == str(old)
    assert greet.first("enter.kernel").startswith(os.uname().sysname)


def test_a_python_that_hangs_costs_a_bounded_time(shell, tmp_path):
    hangs = tmp_path / "python3"
    hangs.write_text("#!/bin/sh\nexec sleep 100\n")
    hangs.chmod(0o755)
    greet, _ = enter(shell, tmp_path / "root", python=str(hangs))
    assert greet.no_python


def test_home_gives_the_root_of_a_user(shell, tmp_path):
    greet, _ = enter(shell, "~/orch", b"", HOME=str(tmp_path))
    assert greet.first("enter.root") == f"{tmp_path}/orch"


def test_a_root_with_spaces_and_quotes(shell, tmp_path):
    app, digest = zipapp.build()
    root = tmp_path / 'it\'s a "root" $HOME'
    greet, _ = enter(shell, root, app, digest, len(app))
    assert greet.serving and (root / "bin" / zipapp.name(digest)).exists()
