"""What a line can become in bash, zsh and fish, and that a Tab costs nothing else."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import history
from orchestrator.completion import make
from orchestrator.completion.shells import SCRIPTS, quoted, split
from orchestrator.completion.table import COMMANDS
from orchestrator.completion.words import complete, subcommands

RUN = "demo-20260102-100000"
HOSTS = """\
hosts:
  local: {}
  pve:
    ssh: root@192.0.2.10
    containers: {"200": {}, web.1: {kind: lxc}}
  bench: {ssh: null}
"""
SOLVED = "done >"  # what a shell prints before the words that it understood


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A project with names that shells find hard, the index of two runs, and `orch` as a command."""
    home = tmp_path_factory.mktemp("home")
    (home / "recipes/envs/mine").mkdir(parents=True)
    (home / "recipes/envs/mine/spec.yaml").write_text("torch: 2.13.0\n")
    (home / "hosts.yaml").write_text(HOSTS)
    (home / "recipes/base.yaml").write_text(
        "environment: mine\nsettings: {deep: {first: 1, second: 2}}\ncommand: [x]\n"
    )
    (home / "recipes/my own.yaml").write_text(
        "extends: base\ndescription: Words of mine\nsettings: {deep: {third: 3}}\n"
    )
    (home / "recipes/b:c.yaml").write_text("environment: mine\n")
    (home / "recipes/p$q'r.yaml").write_text("environment: mine\n")
    (home / "notes.txt").write_text("")
    (home / "bin").mkdir()
    orch = home / "bin/orch"
    orch.write_text(f"#!{sys.executable}\nfrom orchestrator.cli import main\nmain()\n")
    orch.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCH_STATE_DIR", str(home / "state"))
        history.remember(
            [
                history.Entry("other-20260101-090000", "local", "other", 1.0),
                history.Entry(RUN, "pve/200", "demo", 2.0),
                history.Entry(RUN, "pve/web.1", "demo", 2.0, 1),
            ]
        )
        history.add_times([history.StepTime(3.0, "code", "pve/200", "demo", "0123456789abcdef", "in place", 0, 1.0)])
        names = [history.Seen("generation", "pve/200", "demo", str(n), "good") for n in (7, 8)]
        history.see("generation", "pve/200", None, names)
        history.see("cache", "pve/200", None, [history.Seen("cache", "pve/200", "demo", "fedcba9876543210")])
    return home


@pytest.fixture
def here(home, monkeypatch):
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    return home


def environment(home):
    return {
        "HOME": str(home),
        "ORCH_STATE_DIR": str(home / "state"),
        "ORCH_DATA_DIR": str(home / "data"),
        "PATH": f"{home}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_CONFIG_HOME": str(home / ".config"),
    }


def words(*line):
    found = complete(list(line[:-1]), line[-1])
    assert found is not None
    return [word for word, _ in found]


def test_the_table_is_what_the_app_says():
    assert make.text() == make.TABLE.read_text(), "make it anew: python -m orchestrator.completion.make"


def test_every_command_is_completed_with_its_options():
    for path in COMMANDS:
        *above, name = path.split(" ") if path else [""]
        assert not path or name in words(*above, name[:1])
        offered = words(*path.split(), "--")
        assert "--help" in offered and all(word.startswith("--") for word in offered)
        assert [one for one, _ in subcommands(path)] == words(*path.split(), "")[: len(subcommands(path))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("sta",), ["status"]),
        (("env", "l"), ["list", "lock"]),
        (("nothing", ""), []),
        (("launch", "my"), ["my own"]),
        (("launch", "demo", "-p", "pve/"), ["pve/200", "pve/web.1"]),
        (("launch", "demo", "--place", "loc"), ["local"]),
        (("launch", "demo", "--place=pve/2"), ["--place=pve/200"]),
        (("launch", "demo", "-dp", "pve/2"), ["pve/200"]),
        (("launch", "demo", "--ne"), ["--new"]),
        (("launch", "demo", "--new", "--ne"), []),  # once is enough
        (("launch", "demo", "--set", "a=1", "--se"), ["--set"]),  # but not of this one
        (("trust", ""), ["pve"]),
        (("doctor", "pve/w"), ["pve/web.1"]),
        (("status", ""), [RUN, "other-20260101-090000", "demo", "other"]),
        (("status", "-p", "local", ""), ["other-20260101-090000", "other"]),
        (("status", "--tail", "3", "oth"), ["other-20260101-090000", "other"]),
        (("env", "lock", "mi"), ["mine"]),
        (("env", "build", "012"), ["0123456789abcdef"]),
        (("probe", "local", "--env", "012"), []),  # used elsewhere
        (("env", "use", "demo", "-g", ""), ["7", "8"]),
        (("env", "mark", "demo", "8", ""), ["good", "bad", "new"]),
        (("env", "mark", "base", ""), []),  # whose generations were never seen; options follow a dash
        (("cache", "push", "fed"), ["fedcba9876543210"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("launch", "base", "--set", "settings."), ["settings.deep."]),
        (
            ("launch", "my own", "--set", "settings.deep."),
            ["settings.deep.first=", "settings.deep.second=", "settings.deep.third="],
        ),
        (("launch", "my own", "--set", "place=pve/w"), ["place=pve/web.1"]),
        (("launch", "my own", "--set=environment=mi"), ["--set=environment=mine"]),
        (("launch", "b:c", "--set", "settings.topology.mo"), ["settings.topology.mode="]),
        (("launch", "b:c", "--set", "settings.topology.mode=sp"), ["settings.topology.mode=split"]),
        (("launch", "my own", "--set", "settings.topology.mo"), []),  # a trainer of one's own
        (("exec", "pve/200", "--", ""), []),
        (("exec", "--", "pve/2"), ["pve/200"]),
    ],
)
def test_what_a_line_can_become(here, line, expected):
    if expected == [] and line[-1] == "":
        assert not [word for word in words(*line) if not word.startswith("--")]
    else:
        assert words(*line) == expected


def test_what_words_mean_is_said(here):
    assert dict(complete(["launch"], "") or ())["my own"] == "Words of mine"
    said = dict(complete(["status"], "") or ())
    assert said[RUN].startswith("demo at pve/200, pve/web.1, ") and said["demo"] == "its latest run"
    assert dict(complete(["launch", "my own", "--set"], "settings.deep.") or ())["settings.deep.first="] == "now 1"
    assert complete(["diagnose", "--log"], "no") is None  # the shell knows files


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from([*COMMANDS, "--set", "-p", "--", "-", "--x=y", "é\udce9", "a b"]) | st.text(max_size=6))
)
def test_no_line_is_too_odd(line):
    last = line[-1] if line else ""
    found = complete(line[:-1], last)
    assert found is None or all(word.startswith(last) for word, _ in found)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp", "Zs")) | st.just(" "), min_size=1)))
def test_a_line_is_read_as_a_shell_reads_it(given_words):
    for line in (" ".join(map(quoted, given_words)), shlex.join(given_words)):
        assert shlex.split(line) == given_words
        before, last, raw, quote = split(f"{line} ")
        assert (before, last, raw, quote) == (given_words, "", "", "") or "=" in line  # an assignment is no command
        before, last, raw, quote = split("orch " + line)
        assert (
            [*before, last][1:] == (given_words or [""]) and not quote and "orch " + line == line_of(before, raw, line)
        )


def line_of(before, raw, line):
    assert line.endswith(raw)
    return "orch " + line


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("orch launch 'my o", (["orch", "launch"], "my o", "'my o", "'")),
        ('orch launch "a\\"b', (["orch", "launch"], 'a"b', '"a\\"b', '"')),
        ("X=1 Y+='a b' orch st", (["orch"], "st", "st", "")),
        ("orch a\\", (["orch"], "a", "a\\", "")),
        ("orch '' ", (["orch", ""], "", "", "")),
    ],
)
def test_a_line_that_is_not_whole(line, read):
    assert split(line) == read


def test_a_tab_imports_nothing_heavy_and_writes_nothing(here, tmp_path):
    program = (
        "import sys\nfrom orchestrator.cli import main\n"
        "for words in (['st'], ['launch', ''], ['launch', 'demo', '-p', ''], ['status', ''], ['a', '--set', 's']):\n"
        "    sys.argv = ['orch', *words]\n    main()\n"
        "heavy = {'typer', 'rich', 'pydantic', 'paramiko', 'torch', 'packaging', 'socket', 'subprocess'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    empty = {"ORCH_STATE_DIR": str(tmp_path / "none"), "_ORCH_COMPLETE": "zsh"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ, **empty}
    )
    assert done.returncode == 0, done.stderr
    assert "status\tShow runs" in done.stdout and "pve/200" in done.stdout and done.stderr == ""
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (HOSTS + "  more: [\n  lost: {}\n", ["local", "pve", "pve/200", "pve/web.1", "bench"]),
        (HOSTS + "  - broken: [\n", ["local", "pve", "pve/200", "pve/web.1", "bench"]),  # what comes before the fault
        ("hosts: [a, b]\n", ["local"]),
        ("hosts: {a: 5, b: {ssh: x, containers: 7}}\n", ["local", "a", "b"]),
        ("\x00\xff", ["local"]),
        ("a: &a [*a]\nhosts: *a\n", ["local"]),
        ("", ["local"]),
    ],
)
def test_files_that_are_broken_complete_what_they_can_and_print_nothing(here, tmp_path, hosts, expected):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "hosts.yaml").write_text(hosts, encoding="latin-1")
    (tmp_path / "recipes/wrong.yaml").write_text("settings: {a: 1\nb: [\n")
    (tmp_path / "recipes/round.yaml").write_text("extends: round\nsettings: &s {a: *s}\n")
    os.chdir(tmp_path)
    assert words("launch", "demo", "-p", "") == expected
    assert words("launch", "wron") == ["wrong"]
    for recipe in ("wrong", "round", "nothing"):
        assert "environment=" in words("launch", recipe, "--set", "")
    environ = {**os.environ, "_ORCH_COMPLETE": "bash"}
    done = subprocess.run(["orch", "orch launch -p ", ""], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.stdout.split(), done.stderr, done.returncode) == (expected, "", 0)


def test_an_unknown_shell_gets_nothing_and_runs_nothing(here):
    done = subprocess.run(
        ["orch", "--version"], capture_output=True, text=True, env={**os.environ, "_ORCH_COMPLETE": "complete_bash"}
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_glance_at_the_index_is_what_the_index_says_and_waits_for_nobody(here):
    assert history.at_a_glance() == history.known()
    assert history.at_a_glance("pve/200") == history.known("pve/200")
    path = history.state_directory() / "index.sqlite"
    with sqlite3.connect(path) as writer:
        writer.execute("begin exclusive")
        assert history.at_a_glance() == [] and words("status", "zzz") == []
    assert history.at_a_glance("nowhere") == []


@pytest.mark.parametrize("given", ["", "/somewhere", " "])
def test_the_index_is_where_the_platform_says(monkeypatch, given):
    from platformdirs import user_state_path

    monkeypatch.delenv("ORCH_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", given)
    assert history.state_directory() == user_state_path("orch")


# --- the shells themselves -------------------------------------------------------------------------

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}


class Terminal:
    """A shell at a terminal of its own, in which keys are pressed."""

    def __init__(self, shell, home):
        script = home / f"completion.{shell}"
        script.write_text(SCRIPTS[shell])
        pid, self.fd = pty.fork()
        if pid == 0:
            os.chdir(home)
            os.environ.update(environment(home), TERM="dumb" if shell != "fish" else "xterm", COLUMNS="200")
            os.execvp(SHELLS[shell][0], SHELLS[shell])
        self.pid = pid
        self.type(f". {script}; printf '%s%s\\n' rea dy\n")
        self.until("ready")

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def until(self, text, patience=30.0):
        """What was shown up to this text and the rest of its line."""
        shown, end = "", time.monotonic() + patience
        while text not in shown or "\n" not in shown.split(text, 1)[1]:
            assert time.monotonic() < end, shown
            if select.select([self.fd], [], [], 0.2)[0]:
                shown += os.read(self.fd, 65536).decode("utf-8", "replace")
        return shown

    def understood(self, line):
        """The words that the shell makes of a line after a Tab: the line is put behind a command that prints them."""
        self.type(f"{line}\t")
        time.sleep(0.05)  # keys typed ahead wait for the completion; a dumb terminal's bell is none of ours
        self.type("\x01show \x05\n")
        return self.until(SOLVED).split(SOLVED, 1)[1].splitlines()[0].strip()

    def close(self):
        os.close(self.fd)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


SHOW = {
    "bash": "show() { printf '<%s> ' 'done >'\"$@\"; echo; }",
    "zsh": "show() { printf '<%s> ' 'done >'\"$@\"; echo; }",
    "fish": "function show; printf '<%s> ' 'done >'$argv[1] $argv[2..-1]; echo; end",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_in_a_real_shell(home, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    terminal = Terminal(shell, home)
    try:
        terminal.type(SHOW[shell] + "; printf '%s%s\\n' rea dy\n")
        terminal.until("ready")
        for line, expected in [
            ("orch rollb", "orch rollback-env"),
            ("orch launch my", "orch launch 'my own'"),
            ("orch launch my\\ o", "orch launch 'my own'"),
            ("orch launch 'my", "orch launch 'my own'"),
            ("orch launch b:", "orch launch b:c"),
            ("orch launch p", shlex.join(["orch", "launch", "p$q'r"])),
            ("orch launch demo -p pve/2", "orch launch demo -p pve/200"),
            ("orch launch demo --place=pve/w", "orch launch demo --place=pve/web.1"),
            ("orch launch b:c --set settings.topology.mode=sp", "orch launch b:c --set settings.topology.mode=split"),
            ("orch launch my\\ own --set settings.deep.th", "orch launch 'my own' --set settings.deep.third="),
            ("orch diagnose --log note", "orch diagnose --log notes.txt"),
        ]:
            shown = "> ".join(f"<{word}" for word in shlex.split(expected)) + ">"
            assert terminal.understood(line) == shown.removeprefix("<"), line
    finally:
        terminal.close()


def test_it_is_installed_once_and_nothing_of_the_users_is_lost(tmp_path, monkeypatch):
    from orchestrator.cli.completion import install
    from orchestrator.errors import OrchError

    home = tmp_path / "it's home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    (home / ".bashrc").write_text("alias ll='ls -l'")
    for _ in range(2):
        for shell in SCRIPTS:
            install(shell)
    first, second = (home / ".bashrc").read_text().splitlines()
    assert first == "alias ll='ls -l'" and len((home / ".zshrc").read_text().splitlines()) == 1
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{second}; complete -p orch"], capture_output=True, text=True, timeout=30
    )
    assert "_orch_complete orch" in done.stdout, done.stderr
    assert (home / ".config/fish/completions/orch.fish").read_text() == SCRIPTS["fish"]
    (home / ".bashrc").unlink()
    (home / ".bashrc").mkdir()
    with pytest.raises(OrchError, match="put the script where bash reads it"):
        install("bash")
