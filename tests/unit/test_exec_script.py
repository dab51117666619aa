"""The script of `orch exec`, under every POSIX shell of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.place.exec import Marked, encode
from orchestrator.place.greeting import script

SHELLS = [[path] for name in ("dash", "bash", "mksh", "ksh") if (path := shutil.which(name))]
SHELLS += [[path, "sh"] for name in ("busybox",) if (path := shutil.which(name))]
ANY_BYTES = st.binary(max_size=12).map(lambda b: os.fsdecode(b.replace(b"\0", b"")))
SHOW = ["sh", "-c", 'for a; do printf "%s\\0" "$a"; done', "sh"]


def run(shell, argv, directory="", **env):
    coding, arguments = encode(argv)
    done = subprocess.run(
        [*shell, "-c", script("exec"), "orch-exec", "n0", coding, directory, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"PATH": os.environ["PATH"], **env},
        check=False,
        timeout=30,
    )
    out, err = Marked("n0"), Marked("n0")
    output, errors = out.feed(done.stdout), err.feed(done.stderr)
    assert out.status == err.status
    return out.status, output, errors


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
@settings(max_examples=25, deadline=None)
@given(arguments=st.lists(ANY_BYTES, max_size=4))
def test_any_bytes_arrive(shell, arguments):
    # An argument that is not ASCII brings the coding about for all.
    for given_arguments in (arguments, ["é", *arguments]):
        status, out, err = run(shell, [*SHOW, *given_arguments])
        assert (status, err) == (0, b"")
        assert [os.fsdecode(part) for part in out.split(b"\0")[:-1]] == given_arguments


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8", None])
def test_the_locale_is_left_as_it_was(shell, locale):
    env = {"LC_ALL": locale} if locale else {}
    status, out, _ = run(shell, ["sh", "-c", 'printf \'%s|%s\' "${LC_ALL-unset}" "$1"', "sh", "é\n\n"], **env)
    assert (status, out.decode()) == (0, f"{locale or 'unset'}|é\n\n")


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
def test_ends(shell):
    assert run(shell, ["sh", "-c", "exit 9"]) == (9, b"", b"")
    assert run(shell, ["sh", "-c", "kill -9 $$"])[0] == 137
    assert run(shell, ["sh", "-c", "kill -9 $$"])[2] == b""
    assert run(shell, ["no-such-command"])[0] == 127
    assert b"no-such-command" in run(shell, ["no-such-command"])[2]
    assert run(shell, ["/"])[0] == 126
    assert run(shell, ["-n"])[0] == 127
    assert run(shell, ["exit", "0"])[0] == 127


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
def test_nothing_of_the_script_is_seen_by_the_command(shell):
    _, out, _ = run(shell, ["env"], HOME="/", MINE="1", name="x", status="y")
    names = {line.split(b"=")[0] for line in out.splitlines()}
    assert names - {b"_", b"PWD", b"OLDPWD", b"SHLVL"} == {b"HOME", b"PATH", b"LANG", b"MINE", b"name", b"status"}
    _, out, _ = run(shell, ["sh", "-c", "ls /proc/self/fd"])
    assert b"9" not in out.split()


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
def test_where_it_runs(shell, tmp_path):
    assert run(shell, ["pwd"], HOME=str(tmp_path))[1].strip() == os.fsencode(tmp_path)
    assert run(shell, ["pwd"], HOME="/no/home")[1] == b"/\n"
    assert run(shell, ["pwd"], directory=str(tmp_path), HOME="/")[1].strip() == os.fsencode(tmp_path)
    import pwd

    home = pwd.getpwuid(os.getuid()).pw_dir
    assert run(shell, ["sh", "-c", 'echo "$HOME"'])[1].strip() == os.fsencode(home)
