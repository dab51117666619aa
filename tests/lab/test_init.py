"""The way of the README's "Your own project", word for word: an empty folder, one alias, a program of ten lines."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.bundled import bundled_dir
from orchestrator.init.files import PROGRAM

END = 60.0  # seconds that a command at a terminal may say nothing


class Desk:
    """A newcomer's machine: a home with an SSH configuration of one alias, and nothing that orch knows yet."""

    def __init__(self, folder: Path, lab, cache: Path) -> None:
        self.home = folder / "home"
        self.folder = folder / "work"
        (self.home / ".ssh").mkdir(parents=True)
        self.folder.mkdir()
        config = re.sub(
            r"(?m)^  (UserKnownHostsFile|StrictHostKeyChecking|BatchMode) .*\n", "", lab.ssh_config.read_text()
        )
        (self.home / ".ssh/config").write_text("Include more.conf\n\nHost *\n  ServerAliveInterval 30\n")
        (self.home / ".ssh/more.conf").write_text(f"{config}  UserKnownHostsFile {self.home}/.ssh/known_hosts\n")
        programs = folder / "bin"
        programs.mkdir()
        # OpenSSH looks for its configuration in the home of the password file, whatever HOME says.
        self._program(programs / "ssh", f'exec /usr/bin/ssh -F "{self.home}/.ssh/config" "$@"')
        self._program(
            programs / "orch", f"exec '{sys.executable}' -c 'from orchestrator.cli import main; main()' \"$@\""
        )
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("ORCH_", "XDG_"))},
            "HOME": str(self.home),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(bundled_dir()),
            "ORCH_STATE_DIR": str(folder / "state"),
            "ORCH_CACHE_DIR": str(cache),
            "ORCH_DATA_DIR": str(folder / "data"),
            "TERM": "xterm",
        }

    @staticmethod
    def _program(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def run(self, line: str, code: int = 0) -> str:
        """A line of shell without a terminal: what it printed on both streams."""
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def type(self, line: str, answers: dict[str, str]) -> tuple[int, str]:
        """A line at a terminal; each answer is typed when its question stands there. Status and all that was shown."""
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            ["sh", "-c", line], cwd=self.folder, env=self.env, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        shown, waiting = "", dict(answers)
        try:
            while select.select([ours], [], [], END)[0]:
                try:
                    data = os.read(ours, 65536)
                except OSError:  # the terminal's other end is closed
                    break
                shown += data.decode("utf-8", "replace")
                for question in [one for one in waiting if one in shown]:
                    os.write(ours, f"{waiting.pop(question)}\n".encode())
            status = child.wait(timeout=10)
        finally:
            child.kill()
            child.wait()
            os.close(ours)
        assert not waiting, f"never asked: {list(waiting)}\n{shown}"
        return status, shown


@pytest.fixture
def desk(tmp_path, lab, tmp_path_factory):
    shared = os.environ.get("ORCH_TEST_CACHE_DIR")
    lab.forget()
    # what the lab's eight GPUs lack
    lab.run("touch", "/dev/nvidia-uvm", vmid="200")
    yield Desk(tmp_path, lab, Path(shared) if shared else tmp_path_factory.getbasetemp() / "wheels")
    lab.run("rm", "-f", "/dev/nvidia-uvm", vmid="200")


def test_the_readme_from_an_empty_folder_to_a_finished_run(desk, lab):
    readme = (bundled_dir() / "README.md").read_text()
    section = readme.partition("\n## Your own project\n")[2].partition("\n## ")[0]
    first, second = re.findall(r"```sh\n(.*?)```", section, re.S)
    commands = [line.partition("#")[0].strip() for line in second.splitlines()]
    assert [command.split()[1] for command in commands] == ["init", "doctor", "launch"]
    desk.run(first)
    desk.folder = desk.folder / "my-project"
    assert [path.name for path in desk.folder.iterdir()] == ["train.py"]
    assert (desk.folder / "train.py").read_text() == PROGRAM

    status, shown = desk.type(commands[0], {"record it?": "y", "VMID or name": "200", "or a command": ""})
    assert status == 0, shown
    assert "ssh-ed25519 SHA256:" in shown and "pct, running, train200" in shown and "a launch can work here" in shown
    assert "environment  plain: train.py needs no package" in shown and "orch launch train" in shown
    written = {path: path.read_text() for path in (desk.folder / "hosts.yaml", desk.folder / "recipes/train.yaml")}
    assert all(text.startswith("# yaml-language-server: $schema=") for text in written.values())

    # once more, with nobody to ask: the host is known, and all that is there is kept
    again = desk.run("orch init pve --container 200 --command 'python train.py'")
    assert again.count("  kept  ") == 2 and all(path.read_text() == text for path, text in written.items())
    assert 'orch: "Which container of pve?" cannot be asked' in desk.run("orch init pve", code=2)

    assert "a launch can work here" in desk.run(commands[1])
    ran = desk.run(commands[2])
    assert "step 40 loss" in ran and re.search(r"train-\S+ at pve/200 finished after", ran)


def test_what_cannot_be_settled_is_told_and_nothing_is_written(desk, lab):
    told = desk.run("orch init pve -c 200 --yes", code=5)  # --yes is no word for a host's key
    [again] = re.findall(r"try: (orch init pve -c 200 --yes --fingerprint SHA256:\S+)", told)
    told = desk.run(f"{again} --container 2000", code=2)
    assert 'pve has no container "2000" (did you mean "200"?); it has 200, 201, 202' in told
    config = desk.home / ".ssh/more.conf"
    config.write_text(config.read_text().replace(f"Port {lab.info['port']}", "Port 1"))
    told = desk.run("orch init pve -c 200 --yes", code=3)
    assert "nothing was written" in told and "--no-check" in told
    assert list(desk.folder.iterdir()) == []
    assert "  written      hosts.yaml" in desk.run("orch init pve -c 200 --yes --no-check")
