"""Whether an environment still is what was built: what was added, removed or changed, named in words.

The quick look compares sizes and times with the manifest's and digests only what differs there; the deep one
digests every file.
"""

from __future__ import annotations

import glob
import os
import re
import time
from typing import Any, Dict, List, Optional, Set

from . import environment_files as files
from .environment_files import Row, Tick

_START_FILES = ("sitecustomize.py", "usercustomize.py")
_SHOWN = 5  # names of files in a sentence
_KEPT = 200  # names of files in a finding
_COUNTED = ("changed", "missing", "added")
_SETTINGS = "include-system-site-packages"


class Difference:
    """Which files are not as the manifest says, and how many of them were looked at."""

    def __init__(self) -> None:
        self.added: List[str] = []
        self.missing: List[str] = []
        self.changed: List[str] = []
        self.looked = 0
        self.digested = 0

    def __bool__(self) -> bool:
        return bool(self.added or self.missing or self.changed)


def compare(root: str, table: Dict[str, Row], deep: bool, tick: Optional[Tick] = None) -> Difference:
    """The files at `root` against the manifest's table. Raises OSError for what cannot be read."""
    there = files.scan(root)
    found = Difference()
    found.looked = len(there)
    doubtful: List[str] = []
    for name, row in there.items():
        wanted = table.get(name)
        if wanted is None:
            if not _is_harmless(root, name, table):
                found.added.append(name)
        elif row[0] != wanted[0]:
            found.changed.append(name)
        elif row[0] == files.LINK:
            if row[1] != wanted[1]:
                found.changed.append(name)
        elif deep or row[1] != wanted[1]:
            # another time alone is no other content: a copy or a restored backup may have done that
            doubtful.append(name)
    found.missing = [name for name in table if name not in there]
    for name, digest in files.digests(root, doubtful, tick).items():
        found.digested += 1
        if digest is None:
            found.missing.append(name)
        elif digest != table[name][2]:
            found.changed.append(name)
    for names in (found.added, found.missing, found.changed):
        names.sort()
    return found


def _is_harmless(root: str, name: str, table: Dict[str, Row]) -> bool:
    """A module that some Python compiled from a file of ours, and says so, is the same code in other words."""
    source = files.source_of(name)
    if source is None or source not in table or table[source][0] == files.LINK:
        return False
    return files.is_bytecode_of(os.path.join(root, name), table[source])


def check(root: str, manifest: Dict[str, Any], deep: bool, tick: Optional[Tick] = None) -> Dict[str, Any]:
    """`{"clean", "summary", "findings", "notes", "deep", "files", "digested", "seconds"}`.

    A finding is `{"kind", "text", "count", "files"}`; `notes` are sentences about what runs do not see, or may.
    Raises OSError where something cannot be read: then nothing is known.
    """
    began = time.monotonic()
    table: Dict[str, Row] = manifest.get("files") or {}
    difference = compare(root, table, deep, tick)
    findings = _findings(root, manifest, table, difference) if difference else []
    findings += _around(manifest)
    return {
        "clean": not findings,
        "summary": summary(findings),
        "findings": findings,
        "notes": notes(manifest),
        "deep": deep,
        "files": difference.looked,
        "digested": difference.digested,
        "seconds": round(time.monotonic() - began, 3),
    }


def summary(findings: List[Dict[str, Any]]) -> str:
    """The findings in one sentence: distributions first, then files; of each the first few."""
    whole = [f["text"] for f in findings if f["kind"] == "distribution"]
    counts = [f["text"] for f in findings if f["kind"] in _COUNTED and f["text"][:1].isdigit()]
    others = [f["text"] for f in findings if f["text"] not in whole and f["text"] not in counts]
    whole, others = _few(whole), _few(others)
    if whole and counts:
        whole, counts = ["%s, with %s" % ("; ".join(whole), ", ".join(counts))], []
    return "; ".join(whole + counts + others)


def _few(texts: List[str]) -> List[str]:
    return texts if len(texts) <= _SHOWN else [*texts[:_SHOWN], "%d more like these" % (len(texts) - _SHOWN)]


def _finding(kind: str, text: str, names: List[str]) -> Dict[str, Any]:
    return {"kind": kind, "text": text, "count": len(names), "files": names[:_KEPT]}


def _findings(root: str, manifest: Dict[str, Any], table: Dict[str, Row], difference: Difference) -> List[Any]:
    told: Set[str] = set()
    findings = _distributions(root, manifest, table, difference, told)
    for name in difference.added:
        if name not in told and os.path.basename(name) in _START_FILES:
            told.add(name)
            findings.append(_finding("start", "%s was added, which every start of Python runs" % name, [name]))
        elif name not in told and name.endswith(".pth"):
            told.add(name)
            text = "%s was added, which every start of Python reads%s" % (name, _first_line(root, name))
            findings.append(_finding("start", text, [name]))
        elif name not in told and files.source_of(name):
            told.add(name)
            findings.append(_finding("bytecode", "%s was not compiled from its source" % name, [name]))
    if "pyvenv.cfg" in difference.changed and _SETTINGS + "=true" in _text(root, "pyvenv.cfg").replace(" ", ""):
        told.add("pyvenv.cfg")
        text = "pyvenv.cfg was changed: the system's own packages are seen too"
        findings.append(_finding("changed", text, ["pyvenv.cfg"]))
    for kind, said, names in (
        ("changed", "changed in", difference.changed),
        ("missing", "missing from", difference.missing),
        ("added", "added to", difference.added),
    ):
        groups: Dict[str, List[str]] = {}
        for name in names:
            if name not in told:
                groups.setdefault(_group(name), []).append(name)
        for group, some in sorted(groups.items()):
            findings.append(_finding(kind, _sentence(said, group, some, kind == "added"), some))
    return findings


def _sentence(said: str, group: str, names: List[str], unowned: bool) -> str:
    count = "1 file" if len(names) == 1 else "%d files" % len(names)
    inner = [name[len(group) :] if name.startswith(group) else name.rpartition(group)[2] for name in names[:_SHOWN]]
    more = ", …" if len(names) > _SHOWN else ""
    tail = ", of no package" if unowned else ""
    return "%s %s %s%s (%s%s)" % (count, said, group or "its folder", tail, ", ".join(inner), more)


def _group(name: str) -> str:
    """The package that a file is shown under: `torch/` for one in site-packages, else the folder at the top."""
    inner = re.sub(r"\Alib(?:64)?/[^/]+/site-packages/", "", name)
    top, separator, _ = inner.partition("/")
    if separator:
        return top + "/"
    return "" if inner == name else "site-packages/"


def _distributions(
    root: str, manifest: Dict[str, Any], table: Dict[str, Row], difference: Difference, told: Set[str]
) -> List[Dict[str, Any]]:
    """What was installed, replaced or taken away as a whole; the files that this explains are added to `told`."""
    before = {files.plain(entry["name"]): entry for entry in manifest.get("distributions") or []}
    now: Dict[str, List[files.Distribution]] = {}
    for distribution in files.distributions(root):
        now.setdefault(distribution.key, []).append(distribution)
    findings = []
    added, changed, missing = set(difference.added), set(difference.changed), set(difference.missing)
    for key, installed in sorted(now.items()):
        old = before.get(key)
        for distribution in installed:
            if old is not None and distribution.version == _escaped(old["version"]):
                continue
            listed = set(files.record(root, distribution)[1]) | {
                name for name in added if name.startswith(distribution.folder + "/")
            }
            listed |= {name for name in added if files.source_of(name) in listed}
            own = listed & added
            if old is None:
                text = "%s %s was installed into this environment" % (distribution.name, distribution.version)
            else:
                own |= {name for name in changed | missing if files.plain(table[name][3] or "") == key}
                verb = "was replaced by" if len(installed) == 1 else "was joined by"
                text = "%s %s %s %s" % (old["name"], old["version"], verb, distribution.version)
            told |= own
            findings.append(_finding("distribution", text, sorted(own)))
    for key, entry in sorted(before.items()):
        if key not in now:
            own = {name for name in missing if files.plain(table[name][3] or "") == key}
            told |= own
            text = "%s %s was removed from this environment" % (entry["name"], entry["version"])
            findings.append(_finding("distribution", text, sorted(own)))
    return findings


def _escaped(version: str) -> str:
    """A version as a .dist-info folder's name has it."""
    return version.replace("-", "_")


def _text(root: str, name: str) -> str:
    try:
        with open(os.path.join(root, name), encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


def _first_line(root: str, name: str) -> str:
    lines = _text(root, name).strip().splitlines()
    shown = "".join(char for char in lines[0][:80] if char.isprintable()) if lines else ""
    return ": %s" % shown if shown else ""


def _around(manifest: Dict[str, Any]) -> List[Dict[str, Any]]:
    """What an environment depends on outside its folder: the Python it was built with, and its start files."""
    python = manifest.get("python") or {}
    findings = []
    base = python.get("base")
    if base and not os.path.exists(base):
        findings.append(_finding("python", "the Python it was built with, %s, is gone" % base, []))
    known = python.get("start_files") or {}
    for path, stamp in start_files(python.get("stdlib")).items():
        if known.get(path) != stamp:
            verb = "was changed" if path in known else "was added"
            findings.append(_finding("start", "%s %s, which every start of Python runs" % (path, verb), [path]))
    return findings


def start_files(stdlib: Optional[str]) -> Dict[str, List[int]]:
    """The start files beside the base Python's own modules, which are seen in every environment: path -> stamp."""
    found = {}
    for name in _START_FILES if stdlib else ():
        path = os.path.join(str(stdlib), name)
        try:
            info = os.stat(path)
        except OSError:
            continue
        found[path] = [info.st_size, info.st_mtime_ns]
    return found


def notes(manifest: Dict[str, Any]) -> List[str]:
    """What lies outside and would be seen by a Python that is started by hand; runs are kept from it."""
    found = []
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"):
        if os.environ.get(name):
            found.append("%s is set at the place (%s): runs do not see it" % (name, os.environ[name][:200]))
    minor = ".".join(str((manifest.get("python") or {}).get("version") or "").split(".")[:2])
    site = os.path.expanduser("~/.local/lib/python%s/site-packages" % (minor or "?"))
    count = len(glob.glob(os.path.join(glob.escape(site), "*.dist-info")))
    if count:
        what = "1 package" if count == 1 else "%d packages" % count
        found.append("%s of the user in %s: runs do not see them" % (what, site))
    return found
