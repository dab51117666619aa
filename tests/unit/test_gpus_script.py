"""The script on the host that reads and writes claims, under this machine's shells, with a folder in place of /tmp."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.gpus import read

TAKE = "take\nversion 1\nrun mine-1\nplace here\nuuids GPU-1\nend\n"


@pytest.fixture(params=["sh", "bash"])
def ask(request, tmp_path):
    """Runs the script with a decision; -> what it says. `before` is run by the same shell first."""
    if shutil.which(request.param) is None or shutil.which("flock") is None:
        pytest.skip(f"there is no {request.param}, or no flock")
    text = (
        read.script()
        .replace("/run/lock", f"{tmp_path}/none")
        .replace("base=/tmp", f"base={shlex.quote(str(tmp_path))}")
    )
    home = tmp_path / "home"
    home.mkdir()

    def run(decision: str, before: str = ":") -> str:
        words = ["NONCE", "claim", "none", "none", "-", "mine-1", "index"]
        argv = [request.param, "-c", text, "orch-gpus", *words]
        done = subprocess.run(
            ["sh", "-c", f"{before}; exec {shlex.join(argv)}"],
            cwd=home,
            input=decision,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "NONCE gpus.done 1" in done.stdout, done
        return done.stdout

    return run


def claims_of(base: Path) -> Path:
    return base / f"orch-gpus-{os.getuid()}"


def test_a_claim_that_is_only_written_in_part_is_not_said_to_be_taken(ask, tmp_path):
    # no byte can be written to a file, as where the disk is full
    said = ask(TAKE, "trap '' XFSZ; ulimit -f 0")
    assert "gpus.taken" not in said and "gpus.unread claim it could not be written" in said
    assert list(claims_of(tmp_path).iterdir()) == []
    assert "gpus.taken" in ask(TAKE)
    (claim,) = claims_of(tmp_path).iterdir()
    lines = dict(line.split(" ", 1) for line in claim.read_text().splitlines())
    assert lines["run"] == "mine-1" and lines["uuids"] == "GPU-1" and lines["holder"].count(" ") == 1 and lines["boot"]


def test_a_claims_name_leads_to_no_other_file(ask, tmp_path):
    kept = tmp_path / "home/notes.txt"
    kept.write_text("run over\n")
    claims_of(tmp_path).mkdir()
    for name in ("claim-a notes.txt", "claim-b\nnotes.txt", "claim-c *", "claim-dead"):
        (claims_of(tmp_path) / name).write_text("run over\n")
    ask("none\n")
    assert kept.exists()
    assert not (claims_of(tmp_path) / "claim-dead").exists()
