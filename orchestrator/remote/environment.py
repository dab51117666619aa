"""Builds environments at the place: by uv, offline, from wheels that lie here, beside first and then renamed.

An environment is never changed once it has its name. While it is built it is `envs/<id>.tmp-<nonce>`, and
whoever builds holds the lock of the id, so that others wait for it and what a dead builder left can be told
from a live one's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from .files import fsync_folder
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call

MANIFEST_VERSION = 1
# Seconds that one step may take before it is given up.
STEP_LIMIT = 1800.0
SMOKE_LIMIT = 300.0
TELL = 0.5  # seconds between two words of progress

# Run inside the new environment, isolated from everything else. What it prints goes into the manifest.
SMOKE = r"""
import hashlib, importlib.metadata, json, os, platform, sys
found = []
for d in importlib.metadata.distributions():
    record = d.read_text("RECORD") or ""
    found.append({"name": d.metadata["Name"], "version": d.version,
                  "record": hashlib.sha256(record.encode("utf-8", "surrogateescape")).hexdigest()})
found.sort(key=lambda d: d["name"].lower())
answer = {"python": platform.python_version(), "distributions": found, "torch": None}
if "torch" in sys.argv[1:]:
    import torch
    a = torch.ones(8, 8)
    assert float((a @ a).sum()) == 512.0, "a matrix product is wrong"
    answer["torch"] = {"version": torch.__version__, "cuda": torch.version.cuda}
os.write(1, b"\n" + json.dumps(answer).encode("ascii") + b"\n")
"""


def env_status(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Whether the environment `id` is built here: `present`, `path`, `manifest`."""
    path = _path(call.root, args["id"])
    manifest = _manifest(path)
    return {"present": manifest is not None, "path": path, "manifest": manifest}


def env_build(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Builds the environment `id`, unless it is there or another builder finishes it meanwhile.

    `uv` and `python` are programs, `requirements` is text with hashes, `wheels` is a list of {path, filename,
    sha256}; paths that are not absolute are under the root. `expect` is {"torch": version or null, "cuda":
    version or null}. `about` goes into the manifest. Answers `how` ("built", "there", "waited"), `path`,
    `manifest`.
    """
    path = _path(call.root, args["id"])
    manifest = _manifest(path)
    if manifest is not None:
        return {"how": "there", "path": path, "manifest": manifest}
    try:
        os.makedirs(os.path.join(os.path.dirname(path), ".locks"), 0o700, exist_ok=True)
        lock, waited = _lock(path, call)
    except OSError as error:
        raise _named(error, path) from None
    try:
        manifest = _manifest(path)
        if manifest is not None:
            return {"how": "waited" if waited else "there", "path": path, "manifest": manifest}
        _sweep(os.path.dirname(path), os.path.basename(path))
        # A folder without a manifest under the name itself is no environment, and nothing of ours makes one.
        if os.path.lexists(path):
            os.rename(path, "%s.polluted-%d" % (path, time.time()))
        return {"how": "built", "path": path, "manifest": _build(path, args, call, lock)}
    finally:
        os.close(lock)


def _path(root: str, ident: Any) -> str:
    if not isinstance(ident, str) or not re.match(r"[0-9a-f]{16}\Z", ident):
        raise OpError("usage", "%r is not the id of an environment" % (ident,))
    return os.path.join(root, "envs", ident)


def _manifest(path: str) -> Optional[Dict[str, Any]]:
    try:
        with open(os.path.join(path, "manifest.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _lock(path: str, call: Call) -> Tuple[int, bool]:
    """The id's lock, held, and whether it had to be waited for. Freed by closing, or by the death of all
    holders."""
    lock = os.open(os.path.join(os.path.dirname(path), ".locks", os.path.basename(path)), os.O_RDWR | os.O_CREAT, 0o600)
    began = told = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, told > began
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(lock)
                raise
        now = time.monotonic()
        if now - told >= TELL or told == began:
            told = now
            call.event({"step": "waiting for another builder", "seconds": round(now - began, 1)})
        time.sleep(0.1)


def _sweep(parent: str, mine: str) -> None:
    """Removes what dead builders left: of `mine`, whose lock the caller holds, and of ids whose lock is free."""
    for entry in os.listdir(parent):
        ident, separator, _ = entry.partition(".tmp-")
        if not separator:
            continue
        lock = -1
        try:
            if ident != mine:
                lock = os.open(os.path.join(parent, ".locks", ident), os.O_RDWR)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)
        except OSError:
            pass  # a live builder's
        finally:
            if lock >= 0:
                os.close(lock)


def _build(path: str, args: Dict[str, Any], call: Call, lock: int) -> Dict[str, Any]:
    began = time.time()
    temporary = "%s.tmp-%s" % (path, secrets.token_hex(4))
    work = temporary + ".work"
    builder = _Builder(call, lock, work, temporary, len(args["wheels"]))
    try:
        os.makedirs(os.path.join(work, "wheels"), 0o700)
        os.mkdir(os.path.join(work, "home"), 0o700)
        for wheel in args["wheels"]:
            source = os.path.join(call.root, wheel["path"])
            if not os.path.isfile(source):
                raise OpError("failed", "the wheel %s is gone from the place: run it again" % wheel["filename"])
            os.symlink(source, os.path.join(work, "wheels", wheel["filename"]))
        with open(os.path.join(work, "requirements.txt"), "w", encoding="utf-8") as file:
            file.write(args["requirements"])
        seconds = builder.install(os.path.join(call.root, args["uv"]), args["python"], args)
        # Its thousands of links are removed while the check runs, which waits for other things.
        cache = threading.Thread(target=shutil.rmtree, args=(os.path.join(work, "cache"), True))
        cache.start()
        try:
            found = builder.check(args)
        finally:
            cache.join()
        manifest = dict(args.get("about") or {})
        manifest.update(
            version=MANIFEST_VERSION,
            id=os.path.basename(path),
            built=began,
            seconds=dict(seconds, total=round(time.time() - began, 2)),
            python={"path": args["python"], "version": found["python"]},
            torch=found["torch"],
            distributions=found["distributions"],
            wheels=[{key: wheel.get(key) for key in ("filename", "sha256", "origin")} for wheel in args["wheels"]],
        )
        with open(os.path.join(temporary, "manifest.json"), "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        builder.tell("writing to disk", 0.0)
        _sync(temporary)
        os.rename(temporary, path)
        fsync_folder(os.path.dirname(path))
        return manifest
    except OSError as error:
        raise _named(error, path) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)


class _Builder:
    """The programs that one build runs, in an environment of their own."""

    def __init__(self, call: Call, lock: int, work: str, temporary: str, total: int) -> None:
        self.call = call
        self.lock = lock
        self.work = work
        self.temporary = temporary
        self.total = total
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
        count = 0
        for base in ("lib", "lib64"):
            folder = os.path.join(self.temporary, base)
            if os.path.islink(folder) or not os.path.isdir(folder):
                continue
            for python in os.listdir(folder):
                try:
                    names = os.listdir(os.path.join(folder, python, "site-packages"))
                except OSError:
                    continue
                count += sum(name.endswith(".dist-info") for name in names)
        return count

    def install(self, uv: str, python: str, args: Dict[str, Any]) -> Dict[str, float]:
        """Makes the venv and installs into it: seconds by step. Raises OpError."""
        seconds = {}
        step = time.monotonic()
        argv = [uv, *["venv", "--quiet", "--relocatable", "--no-project", "--python"], python, self.temporary]
        self.run("creating", argv, args)
        seconds["venv"] = round(time.monotonic() - step, 2)
        step = time.monotonic()
        inside = os.path.join(self.temporary, "bin", "python")
        argv = [uv, *["pip", "sync", "--quiet", "--offline", "--no-index", "--no-build", "--require-hashes"]]
        argv += ["--find-links", os.path.join(self.work, "wheels"), "--python", inside]
        self.run("installing", [*argv, os.path.join(self.work, "requirements.txt")], args)
        seconds["install"] = round(time.monotonic() - step, 2)
        return seconds

    def check(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Imports what must work, and compares what is there with what was asked. Raises OpError."""
        expect = args.get("expect") or {}
        argv = [os.path.join(self.temporary, "bin", "python"), "-I", "-c", SMOKE]
        if expect.get("torch"):
            argv.append("torch")
        output = self.run("checking", argv, args, SMOKE_LIMIT)
        found = json.loads(output.strip().splitlines()[-1])
        wanted = {_plain(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", args["requirements"], re.MULTILINE)}
        there = {_plain(entry["name"]) for entry in found["distributions"]}
        if wanted != there:
            raise OpError(
                "failed",
                "the new environment is not what was asked: %s missing, %s too many; nothing was kept"
                % (", ".join(sorted(wanted - there)) or "none", ", ".join(sorted(there - wanted)) or "none"),
            )
        if expect.get("torch"):
            torch, cuda = found["torch"], expect.get("cuda")
            version = torch["version"] if "+" in expect["torch"] else torch["version"].split("+")[0]
            if version != expect["torch"] or torch["cuda"] != cuda:
                asked = "%s (CUDA %s)" % (expect["torch"], cuda or "none")
                holds = "%s (CUDA %s)" % (torch["version"], torch["cuda"] or "none")
                raise OpError("failed", "torch %s was asked for, the wheel holds %s; nothing was kept" % (asked, holds))
        return dict(found)

    def run(self, step: str, argv: List[str], args: Dict[str, Any], limit: float = STEP_LIMIT) -> str:
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
            raise self.failure(step, child.returncode, err.decode("utf-8", "replace"), args)
        return out.decode("utf-8", "replace")

    def failure(self, step: str, status: int, said: str, args: Dict[str, Any]) -> OpError:
        """A program's failure in one sentence."""
        if "No space left on device" in said or "os error 28" in said or "Errno 28" in said:
            return _full(self.temporary)
        if status < 0:
            return OpError("failed", "%s was interrupted (signal %d); nothing was kept" % (step, -status))
        damaged = self.damaged(args) if step == "installing" else ""
        if damaged:
            return OpError("failed", damaged)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1] if step == "checking" else " ".join(lines)
        return OpError("failed", "%s the environment failed: %s; nothing was kept" % (step, last[:1000] or "no word"))

    def damaged(self, args: Dict[str, Any]) -> str:
        """Names the files that are not what they should be, and removes them: the next try brings them anew."""
        wrong = []
        for wheel in args["wheels"]:
            source = os.path.join(self.call.root, wheel["path"])
            if _sha256(source) != wheel["sha256"]:
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


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: str) -> None:
    """Has the file system of `path` written out: a name that survives a power cut has its contents then."""
    folder = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "syncfs") or libc.syncfs(folder) != 0:
            os.sync()
    finally:
        os.close(folder)


def _full(path: str) -> OpError:
    folder = os.path.dirname(path)
    try:
        free = "%d MB free" % (shutil.disk_usage(folder).free >> 20)
    except OSError:
        free = "free space unknown"
    return OpError("failed", "the disk at %s is full (%s while it was built); nothing was kept" % (folder, free))


def _named(error: OSError, path: str) -> OpError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(path)
    return OpError("failed", "%s cannot be built: %s" % (path, error.strerror or error))


OPS = {"env_status": env_status, "env_build": env_build}
