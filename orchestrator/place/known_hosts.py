"""known_hosts files: which keys are recorded for a machine, and where. They are read here and never rewritten."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import Refused


@dataclass(frozen=True)
class HostKey:
    """A public key of a machine."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """SHA256:…, as ssh-keygen shows it."""
        digest = hashlib.sha256(self.blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")

    @property
    def text(self) -> str:
        """The two words of a known_hosts line."""
        return f"{self.type} {base64.b64encode(self.blob).decode('ascii')}"


@dataclass(frozen=True)
class Entry:
    """One line of a known_hosts file that is about the machine asked for."""

    key: HostKey
    path: Path
    line: int
    revoked: bool = False


def recorded(files: Iterable[Path], name: str) -> list[Entry]:
    """What is recorded for `name` (as of Route.recorded_as). Lines that cannot be read are passed over, and so are
    those of certificate authorities. Raises Refused where a file is there and cannot be read."""
    found = []
    for path in files:
        try:
            text = path.read_bytes().decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise Refused(f"the known hosts in {path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(text.splitlines(), 1):
            entry = _parse(line, path, number, name)
            if entry is not None:
                found.append(entry)
    return found


def _parse(line: str, path: Path, number: int, name: str) -> Entry | None:
    words = line.split()
    marker = words.pop(0).lower() if words and words[0].startswith("@") else ""
    if len(words) < 3 or line.lstrip().startswith("#") or marker not in ("", "@revoked"):
        return None
    if not matches(words[0], name):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return Entry(HostKey(words[1], blob), path, number, marker == "@revoked")


def matches(patterns: str, name: str) -> bool:
    """Whether the first field of a line means `name`: hashed, or a list of patterns with * ? and !."""
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in patterns.split("|")[2:4])
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)
    hit = False
    for pattern in patterns.lower().split(","):
        wanted = pattern.removeprefix("!")
        # Brackets belong to [host]:port here, not to the pattern.
        if fnmatch.fnmatchcase(name, wanted.replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


def names_for(recorded_as: str) -> list[str]:
    """Names to look under, in turn: like OpenSSH, a host on another port may be recorded without it."""
    if recorded_as.startswith("["):
        return [recorded_as, recorded_as[1:].partition("]")[0]]
    return [recorded_as]


def check(key: HostKey, files: Sequence[Path], recorded_as: str, host: str, address: str) -> None:
    """Passes where this very key is recorded. Raises Refused, saying how it would be recorded, otherwise."""
    with_port, *without = names_for(recorded_as)
    entries = recorded(files, with_port)
    for entry in entries:
        if entry.revoked and entry.key == key:
            raise Refused(
                f"the {key.type} host key of {address}, {key.fingerprint}, is marked as revoked in "
                f"{entry.path}:{entry.line}"
            )
    good = [entry for entry in entries if not entry.revoked]
    if any(entry.key == key for entry in good):
        return
    others = [entry for entry in good if entry.key.type == key.type] or good
    if others:
        raise changed(key, others[0], recorded_as, host, address)
    for name in without:
        if any(entry.key == key and not entry.revoked for entry in recorded(files, name)):
            return
    raise Refused(
        f"the host key of {address} is not known: it offers {key.type} {key.fingerprint}. Compare this with the "
        "fingerprint on that machine (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub) before it is recorded",
        f"orch trust {host}",
    )


def changed(key: HostKey, old: Entry, recorded_as: str, host: str, address: str) -> Refused:
    """The refusal of a key where another is recorded."""
    return Refused(
        f"the host key of {address} has changed: it offers {key.type} {key.fingerprint}, but {old.path}:{old.line} "
        f"holds {old.key.type} {old.key.fingerprint}. Either the machine was set up anew, or this is another machine",
        f"ssh-keygen -R '{recorded_as}' -f {old.path}, when you know why it changed; then: orch trust {host}",
    )


def types_first(entries: Iterable[Entry], offered: Sequence[str]) -> tuple[str, ...]:
    """The key algorithms to ask for, those of recorded keys before all others: a machine has several keys."""
    wanted: list[str] = []
    for entry in entries:
        kind = entry.key.type
        wanted += ["rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind]
    ahead = [kind for kind in dict.fromkeys(wanted) if kind in offered]
    return (*ahead, *(kind for kind in offered if kind not in ahead))


def line_for(key: HostKey, recorded_as: str, hashed: bool) -> str:
    """A line for a known_hosts file, without its newline."""
    name = recorded_as
    if hashed:
        salt = os.urandom(20)
        digest = hmac.new(salt, name.encode(), "sha1").digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    return f"{name} {key.text}"


def append(path: Path, line: str) -> None:
    """Adds one line, in one write; a missing file is made, readable by the user alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(fd).st_size
        # A last line without an end would swallow ours.
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, (("\n" if torn else "") + line + "\n").encode("utf-8"))
    finally:
        os.close(fd)
