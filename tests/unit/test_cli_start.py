"""What the command costs before it does anything, and how it speaks of wrong words."""

from __future__ import annotations

import subprocess
import sys

import pytest


def orch(*words, cwd=None, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-c", "from orchestrator.cli import main; main()", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("words", [("--help",), ("launch", "--help"), ("status", "--help"), ("--version",)])
def test_help_imports_nothing_heavy(words):
    program = (
        "import sys\n"
        "from orchestrator.cli import main\n"
        f"sys.argv = ['orch', *{list(words)!r}]\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = {'paramiko', 'fabric', 'cryptography', 'torch', 'transformers', 'packaging', 'yaml'}\n"
        "    heavy &= set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("launch", "dmo"), 2, 'did you mean "demo"'),
        (("launch", "demo", "--place", "pve"), 2, "pve"),
        (("launch", "demo", "--place", "local/200"), 2, "200"),
        (("launch", "demo", "--set", "enviroment=x"), 2, "environment"),
        (("launch", "demo", "--json"), 2, "--detach"),
        (("status", "--watch", "--json"), 2, "--watch"),
        (("status", "nothing-like-it"), 4, 'no run "nothing-like-it"'),
        (("stop", "nothing-like-it"), 4, 'no run "nothing-like-it"'),
        (("logs", "--pane", "-f"), 2, "--pane"),
        (("trust", "local"), 2, "this machine"),
        (("exec", "local"), 255, "no command"),
        (("exec", "nowhere", "--", "true"), 255, "nowhere"),
        (("frobnicate",), 2, "frobnicate"),
    ],
)
def test_wrong_words_get_a_sentence_and_their_exit_code(words, code, sentence, tmp_path):
    done = orch(*words, cwd=tmp_path, ORCH_STATE_DIR=str(tmp_path / "state"), HOME=str(tmp_path))
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_attaching_to_a_session_that_is_gone_names_the_next_command():
    from orchestrator.cli.attach import attach_argv
    from orchestrator.config import Host, Place

    argv = attach_argv(Place(Host(name="local", ssh=None, root=None, python=None, containers={})), "gone-1")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert done.stderr == "orch: its tmux session is gone; the log is not\n  try: orch logs gone-1\n"


def test_the_list_of_commands_cuts_no_sentence():
    shown = orch("--help", COLUMNS="80").stdout.split("Commands:")[1]
    assert "launch" in shown
    assert "..." not in shown
