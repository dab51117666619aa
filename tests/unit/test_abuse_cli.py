"""Places where the command line is used badly: closed and full outputs, small encodings, a folder that is gone."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import history
from orchestrator.config import find_project, load_recipe
from orchestrator.errors import ConfigError


def orch(tmp_path, *words, code=0, **more):
    root = tmp_path / "root"
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": {"local": {"root": str(root)}}}))
    environment = {
        **os.environ,
        "ORCH_STATE_DIR": str(tmp_path / "state"),
        "ORCH_CACHE_DIR": str(tmp_path / "cache"),
        **more.pop("env", {}),
    }
    done = subprocess.run(
        [*more.pop("before", []), sys.executable, "-c", "from orchestrator.cli import main; main()", *words],
        cwd=tmp_path,
        env=environment,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **more},
    )
    assert b"Traceback" not in (done.stderr or b""), done.stderr.decode()
    assert code is None or done.returncode == code, (done.returncode, done.stderr)
    return done


@pytest.fixture
def a_run(tmp_path):
    """A place with one run that ended, whose log holds more than ASCII."""
    run = tmp_path / "root/runs/one-20260101-000000"
    run.mkdir(parents=True)
    state = {"version": 1, "run": run.name, "recipe": "one", "user": "u", "phase": "failed", "created": 1.0}
    (run / "state.json").write_text(json.dumps(state))
    (run / "console.log").write_bytes("τ is 3 °C\n".encode())
    return run


@pytest.mark.parametrize("words", [("status",), ("status", "one"), ("status", "--json"), ("logs", "one")])
def test_an_encoding_that_lacks_a_letter_stops_nothing(words, tmp_path, a_run):
    done = orch(tmp_path, *words, env={"PYTHONIOENCODING": "ascii"})
    if "--json" in words:
        assert json.loads(done.stdout.decode("ascii"))["places"][0]["runs"][0]["log_tail"] == ["τ is 3 °C"]


def test_a_full_disk_behind_stdout_is_told(tmp_path, a_run):
    for words in (("status",), ("status", "--json"), ("logs", "one"), ("--help",)):
        with Path("/dev/full").open("wb") as full:
            done = orch(tmp_path, *words, code=1, stdout=full)
        assert b"No space left" in done.stderr


def test_exec_does_not_take_a_full_disk_for_the_commands_own_status(tmp_path):
    with Path("/dev/full").open("wb") as full:
        done = orch(tmp_path, "exec", "local", "--", "echo", "x", code=255, stdout=full)
    assert done.stderr.startswith(b"orch: the output cannot be written: No space left")


def test_closed_streams_are_as_good_as_dev_null(tmp_path, a_run):
    for words in (["status"], ["status", "--json"], ["logs", "one"], ["exec", "local", "--", "cat"]):
        closing = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
        orch(tmp_path, *words, before=closing)


def test_a_number_of_columns_that_means_unknown_leaves_the_table_readable(tmp_path, a_run):
    assert b"one-20260101-000000" in orch(tmp_path, "status", env={"COLUMNS": "0"}).stdout


@pytest.mark.parametrize(
    ("words", "code"), [(("status",), 2), (("exec", "local", "--", "true"), 255), (("attach",), 2)]
)
def test_a_current_directory_that_is_gone_is_one_sentence(words, code, tmp_path):
    gone = ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh"]
    done = orch(tmp_path, *words, code=code, before=gone)
    assert b"the current directory is not there any more" in done.stderr


def test_a_shell_that_reads_what_completion_prints_runs_none_of_its_words(tmp_path):
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = orch(tmp_path, "completion", "bash", env=home)
    assert done.stdout == b"" and b"it is there in each new bash" in done.stderr
    assert b"complete" in orch(tmp_path, "completion", "bash", "--show", env=home).stdout


def test_a_run_that_is_not_there_is_told_with_the_places_that_were_asked(tmp_path, a_run):
    done = orch(tmp_path, "logs", "won", code=None)
    assert b'there is no run "won" at local\n' in done.stderr and done.returncode != 0
    assert b"hosts: local; looked in hosts.yaml" in orch(tmp_path, "status", "-p", "pve", code=2).stderr


def test_a_sentence_breaks_between_words_on_a_terminal_and_what_is_to_be_typed_stays_whole(tmp_path):
    ours, theirs = pty.openpty()
    try:
        orch(tmp_path, "launch", "x" * 30, code=2, stderr=theirs, env={"COLUMNS": "40"})
        told = os.read(ours, 10_000).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    assert len(told) > 2 and " ".join(told).split()[:6] == ["orch:", "there", "is", "no", "recipe", f'"{"x" * 30}"']
    assert all(len(line) <= 40 for line in told[:-1]) and told[-1].startswith("  try: recipes: demo, ")
    assert orch(tmp_path, "launch", "x" * 30, code=2).stderr.count(b"\n") == 2


@pytest.mark.parametrize("state", ["/dev/null", "/proc/nothing", "/dev/null/x"])
def test_without_an_index_the_places_are_asked(state, tmp_path, a_run):
    assert orch(tmp_path, "logs", "one", env={"ORCH_STATE_DIR": state}).stdout == "τ is 3 °C\n".encode()
    done = orch(tmp_path, "status", "one", env={"ORCH_STATE_DIR": state})
    assert done.stderr.count(b"cannot be used") == 1


def test_an_index_that_cannot_be_opened_now_is_not_thrown_away(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_STATE_DIR", str(tmp_path))
    (tmp_path / "index.sqlite").mkdir()
    history.remember([history.Entry("a-1", "local", "a", 1.0)])
    assert history.known() == []
    assert (tmp_path / "index.sqlite").is_dir()


def recipe(tmp_path: Path, text: str, *overrides: str) -> None:
    (tmp_path / "recipes").mkdir(exist_ok=True)
    (tmp_path / "recipes/r.yaml").write_text("environment: e\n" + text)
    load_recipe(find_project(tmp_path), "r", overrides=overrides)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("command: {python} -m x\n", ':2:10: text that begins with "{" needs quotes: "{python} -m x"'),
        ("command: [{python}, x]\n", ':2: {python} without quotes is a mapping; for the text write "{python}"'),
        ("command: [{python}/x, y]\n", ':2:11: text that begins with "{" needs quotes: "{python}/x"'),
        ("command:\n  - {python}\n", ':3: {python} without quotes is a mapping; for the text write "{python}"'),
        ("env:\n  A: {run_dir}/x # y\n", ':3:6: text that begins with "{" needs quotes: "{run_dir}/x"'),
        ("settings:\n  out: {run_dir}\n", ':3: {run_dir} without quotes is a mapping; for the text write "{run_dir}"'),
    ],
)
def test_a_word_in_braces_without_quotes_is_told_to_need_them(text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, text)
    assert caught.value.message == f"recipes/r.yaml{sentence}"


def test_a_key_without_end_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="takes KEY=VALUE"):
        recipe(tmp_path, "", "settings." + "a." * 3000 + "b=1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_what_exec_started_here(number, tmp_path):
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": {"local": {"root": str(tmp_path / "root")}}}))
    words = ["exec", "local", "--", "sh", "-c", "echo $$; exec sleep 300"]
    program = [sys.executable, "-c", "from orchestrator.cli import main; main()", *words]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        command = int(running.stdout.readline())
        running.send_signal(number)
        assert running.wait(30) == 130
        assert running.stderr.read() == b""
    end = time.monotonic() + 10
    while Path(f"/proc/{command}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{command}").exists()


def test_an_interrupt_at_the_very_start_is_silent(tmp_path):
    program = "import builtins, signal\nfrom orchestrator.cli import main\nold = builtins.__import__\n"
    program += (
        "def new(name, *a):\n    if name == 'typer': signal.raise_signal(signal.SIGINT)\n    return old(name, *a)\n"
    )
    program += "builtins.__import__ = new\nmain()\n"
    done = subprocess.run([sys.executable, "-c", program, "status"], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
