"""The programs that make one environment: uv, and the new environment's own Python for a check."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, Dict, List

from . import environment_files as files
from .environment_files import plain
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call

# Seconds that one step may take before it is given up.
STEP_LIMIT = 1800.0
SMOKE_LIMIT = 300.0
TELL = 0.5  # seconds between two words of progress

# Run inside the new environment, isolated from everything else. Its imports leave their compiled modules there.
SMOKE = r"""
import json, os, platform, sys, sysconfig
answer = {"python": platform.python_version(), "stdlib": sysconfig.get_path("stdlib"), "torch": None,
          "base": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)}
if "torch" in sys.argv[1:]:
    import torch
    a = torch.ones(8, 8)
    assert float((a @ a).sum()) == 512.0, "a matrix product is wrong"
    answer["torch"] = {"version": torch.__version__, "cuda": torch.version.cuda}
os.write(1, b"\n" + json.dumps(answer).encode("ascii") + b"\n")
"""

PIP = """\
#!/bin/sh
# In place of pip: nothing is installed into an environment that is there.
cat >&2 <<'END'
%s
END
exit 1
"""
PIP_MODULE = '''\
"""In place of pip: nothing is installed into an environment that is there."""
import sys

if __name__ == "__main__":
    sys.exit(%r)
raise ImportError("there is no pip in this environment")
'''
PIP_SAYS = """\
orch: nothing is installed into this environment (%(name)s): it is what its lock says, and each launch checks that.
  To have another package, name it in recipes/envs/%(name)s/requirements.in, then:
  try: orch env lock %(name)s && orch launch RECIPE"""


class Maker:
    """The programs that one build runs, in an environment of their own."""

    def __init__(self, call: Call, lock: int, work: str, temporary: str, args: Dict[str, Any]) -> None:
        self.call = call
        self.lock = lock
        self.work = work
        self.temporary = temporary
        self.args = args
        self.total = len(re.findall(r"^[A-Za-z0-9]", args["requirements"], re.MULTILINE))
        # Nothing of the caller's UV_*, PIP_* or PYTHON* counts. The cache is the build's own and goes with
        # it: the files it shares with the environment by hard links are then the environment's alone, and
        # none was copied.
        self.environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.path.join(work, "home"),
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": os.path.join(work, "home"),
            "UV_CACHE_DIR": os.path.join(work, "cache"),
            "UV_LINK_MODE": "hardlink",
            "UV_NO_CONFIG": "1",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "NO_COLOR": "1",
        }

    def tell(self, step: str, seconds: float) -> None:
        self.call.event({"step": step, "seconds": round(seconds, 1), "done": self.installed(), "total": self.total})

    def installed(self) -> int:
        """How many distributions lie in the new environment."""
        try:
            return min(self.total, len(files.distributions(self.temporary)))
        except OSError:
            return 0

    def install(self) -> Dict[str, float]:
        """Makes the venv and installs into it: seconds by step. Raises OpError."""
        uv = os.path.join(self.call.root, self.args["uv"])
        with open(os.path.join(self.work, "requirements.txt"), "w", encoding="utf-8") as file:
            file.write(self.args["requirements"])
        seconds = {}
        step = time.monotonic()
        argv = [uv, *["venv", "--quiet", "--relocatable", "--no-project", "--python"]]
        self.run("creating", [*argv, self.args["python"], self.temporary])
        seconds["venv"] = round(time.monotonic() - step, 2)
        step = time.monotonic()
        inside = os.path.join(self.temporary, "bin", "python")
        argv = [uv, *["pip", "sync", "--quiet", "--no-build", "--require-hashes", "--python", inside]]
        self.run("installing", [*argv, *self._source(), os.path.join(self.work, "requirements.txt")])
        seconds["install"] = round(time.monotonic() - step, 2)
        return seconds

    def _source(self) -> List[str]:
        """Where uv takes the files from, as its options: wheels that lie here, or what the place knows by itself."""
        source = self.args.get("source") or {}
        if not source:
            return ["--offline", "--no-index", "--find-links", os.path.join(self.work, "wheels")]
        # What is downloaded is kept for the next build, and copied into this one: no file is shared with it.
        cache = os.path.join(self.call.root, "cache", "uv")
        os.makedirs(cache, 0o700, exist_ok=True)
        self.environment.update(UV_CACHE_DIR=cache, UV_LINK_MODE="copy", UV_SYSTEM_CERTS="true")
        self.environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"):
            value = os.environ.get(name) or os.environ.get(name.lower())
            if value:
                self.environment[name] = value
        where = str(source.get("where") or "")
        if source["kind"] == "folder":
            return ["--offline", "--no-index", "--find-links", where]
        options = ["--torch-backend", str(source["backend"])] if source.get("backend") else []
        if source["kind"] == "mirror":
            # by the environment: an address may hold credentials, and command lines are seen by everybody
            self.environment["UV_DEFAULT_INDEX"] = where
            return options
        del self.environment["UV_NO_CONFIG"]  # the place's own settings say where its index is
        self.environment["HOME"] = os.path.expanduser("~")
        return options

    def check(self) -> Dict[str, Any]:
        """Imports what must work, and compares what is there with what was asked. Raises OpError."""
        expect = self.args.get("expect") or {}
        argv = [os.path.join(self.temporary, "bin", "python"), "-I", "-c", SMOKE]
        if expect.get("torch"):
            argv.append("torch")
        output = self.run("checking", argv, SMOKE_LIMIT)
        found = json.loads(output.strip().splitlines()[-1])
        asked = re.findall(r"^([A-Za-z0-9._-]+)==", self.args["requirements"], re.MULTILINE)
        wanted = {plain(name) for name in asked}
        there = {distribution.key for distribution in files.distributions(self.temporary)}
        if wanted != there:
            raise OpError(
                "failed",
                "the new environment is not what was asked: %s missing, %s too many; nothing was kept"
                % (", ".join(sorted(wanted - there)) or "none", ", ".join(sorted(there - wanted)) or "none"),
            )
        if expect.get("torch"):
            torch, cuda = found["torch"], expect.get("cuda")
            # of an index's usual build only the hash says which CUDA it is for, and that was held already
            usual = "+" not in expect["torch"]
            version = torch["version"].split("+")[0] if usual else torch["version"]
            if version != expect["torch"] or (torch["cuda"] != cuda and not usual):
                asked_for = "%s (CUDA %s)" % (expect["torch"], cuda or "none")
                holds = "%s (CUDA %s)" % (torch["version"], torch["cuda"] or "none")
                raise OpError(
                    "failed", "torch %s was asked for, the wheel holds %s; nothing was kept" % (asked_for, holds)
                )
        return dict(found)

    def stub_pip(self, name: str) -> None:
        """Puts something in pip's place that says what to do. Raises OSError."""
        says = PIP_SAYS % {"name": name}
        for program in ("pip", "pip3"):
            path = os.path.join(self.temporary, "bin", program)
            if not os.path.lexists(path):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(PIP % says)
                os.chmod(path, 0o755)
        for site in files.site_packages(self.temporary):
            path = os.path.join(self.temporary, site, "pip")
            if not os.path.lexists(path):
                with open(path + ".py", "w", encoding="utf-8") as file:
                    file.write(PIP_MODULE % says)

    def run(self, step: str, argv: List[str], limit: float = STEP_LIMIT) -> str:
        """Runs one program and tells how it goes: its stdout. Raises OpError."""
        began = time.monotonic()
        self.tell(step, 0.0)
        # A group of its own, so that it ends whole with the client. The lock goes along: while a program that
        # outlived this one still writes, nobody else takes the folder for a dead builder's.
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.work,
            env=self.environment,
            start_new_session=True,
            pass_fds=(self.lock,),
        )
        self.call.children.append(child)
        try:
            while True:
                try:
                    out, err = child.communicate(timeout=TELL)
                    break
                except subprocess.TimeoutExpired:
                    spent = time.monotonic() - began
                    if spent > limit:
                        _end(child)
                        raise OpError("failed", "%s took longer than %d s and was given up" % (step, limit)) from None
                    self.tell(step, spent)
        finally:
            _end(child)
            self.call.children.remove(child)
        if child.returncode:
            raise self.failure(step, child.returncode, err.decode("utf-8", "replace"))
        return out.decode("utf-8", "replace")

    def failure(self, step: str, status: int, said: str) -> OpError:
        """A program's failure in one sentence."""
        if "No space left on device" in said or "os error 28" in said or "Errno 28" in said:
            return full(self.temporary)
        if status < 0:
            return OpError("failed", "%s was interrupted (signal %d); nothing was kept" % (step, -status))
        damaged = self.damaged() if step == "installing" else ""
        if damaged:
            return OpError("failed", damaged)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1] if step == "checking" else " ".join(lines)
        last = re.sub(r"(://)[^/@\s]+@", r"\1", last)
        return OpError("failed", "%s the environment failed: %s; nothing was kept" % (step, last[:1000] or "no word"))

    def damaged(self) -> str:
        """Names the files that are not what they should be, and removes them: the next try brings them anew."""
        wrong = []
        for wheel in self.args["wheels"]:
            source = os.path.join(self.call.root, wheel["path"])
            if files.sha256(source) != wheel["sha256"]:
                wrong.append(wheel["filename"])
                os.unlink(source)
        if not wrong:
            return ""
        return (
            "%s does not have the sha256 that was asked for: it was damaged where it lay, and is removed; "
            "nothing was kept, run it again" % ", ".join(wrong)
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child with its group, if it has not ended."""
    if child.poll() is None:
        try:
            os.killpg(child.pid, 9)
        except OSError:
            child.kill()
        child.wait()


def full(path: str) -> OpError:
    """The disk took no more, in one sentence."""
    folder = os.path.dirname(path)
    try:
        free = "%d MB free" % (shutil.disk_usage(folder).free >> 20)
    except OSError:
        free = "free space unknown"
    return OpError("failed", "the disk at %s is full (%s while it was built); nothing was kept" % (folder, free))


def named(error: OSError, path: str) -> OpError:
    """What stood in the way of a build, in one sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(path)
    where = ": %s" % error.filename if error.filename else ""
    return OpError("failed", "%s cannot be built: %s%s" % (path, error.strerror or error, where))
