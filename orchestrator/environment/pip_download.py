"""One run of `pip download` for a place's platform, with the user's own pip configuration."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from orchestrator.environment.progress import Progress
from orchestrator.environment.target import Target, platforms
from orchestrator.errors import OrchError

RETRIES = 1
TIMEOUT = 15  # seconds for one answer of an index
SILENCE = 150.0  # seconds without a word or a byte, after which pip is given up
_POLL = 0.2

_NETWORK = re.compile(
    r"Failed to establish a new connection|NameResolutionError|Failed to resolve|failure in name resolution"
    r"|Name or service not known|ConnectTimeoutError|ReadTimeoutError|Connection refused|ProxyError"
    r"|Network is unreachable|No route to host|RemoteDisconnected|ConnectionResetError|Connection broken"
    r"|Failed to connect|timed out|SSLError|Connection (?:failed|aborted)"
)
_REASONS = (
    (
        re.compile(r"NameResolutionError|Failed to resolve|name resolution|Name or service not known"),
        "its name does not resolve",
    ),
    (re.compile(r"SSLError"), "the TLS handshake fails"),
    (re.compile(r"ProxyError"), "the proxy does not answer"),
    (re.compile(r"refused"), "the connection is refused"),
    (re.compile(r"imed out|TimeoutError"), "no answer in time"),
)
_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed")
_MISMATCH = re.compile(
    r"^\s+([^\s@]+) ?(?:@ \S+)?(?: from (\S+?))?(?: \(from [^\n]*\))?:\n"
    r"\s+Expected sha256[\s\S]*?Got\s+([0-9a-f]{64})",
    re.MULTILINE,
)
_MISSING = re.compile(r"No matching distribution found for ([^\s(;]+)|The user requested (\S+==\S+)")
_CREDENTIALS = re.compile(r"(://)[^/@\s]+@")


class NoWheel(OrchError):
    """The indexes answered, and have no wheel that fits."""


class Offline(OrchError):
    """An index could not be reached."""


class WrongHash(OrchError):
    """A file came that is not the one the lock means."""


def download(
    requirements: Sequence[str], target: Target, folder: Path, progress: Progress, *, hashed: bool = True
) -> list[Path]:
    """Fetches one wheel for each requirement line (with `--hash=` in it where `hashed`) into `folder`.

    Raises NoWheel, Offline, WrongHash or OrchError, each one sentence.
    """
    listing, there, scratch = folder / "wanted.txt", folder / "wheels", folder / "tmp"
    listing.write_text("".join(f"{line}\n" for line in requirements))
    there.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    argv += ["--progress-bar", "off", "--retries", str(RETRIES), "--timeout", str(TIMEOUT)]
    argv += ["--implementation", "cp", "--abi", target.abi, "--python-version", target.python_version]
    for platform in platforms(target):
        argv += ["--platform", platform]
    argv += ["--dest", str(there), "--requirement", str(listing)]
    if hashed:
        argv.append("--require-hashes")
    status, output = _run(argv, len(requirements), (there, scratch), progress)
    if status:
        raise explain(output, target, len(requirements))
    return sorted(path for path in there.iterdir() if path.suffix == ".whl")


def _run(argv: Sequence[str], files: int, folders: Sequence[Path], progress: Progress) -> tuple[int, str]:
    """Runs pip and tells how it goes. Ends it when it says nothing and fetches nothing for too long."""
    environment = {
        **os.environ,
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # What pip fetches lies here while it comes, on the store's file system, where its growth can be seen.
        "TMPDIR": str(folders[1]),
    }
    lines: list[str] = []
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        said: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_listen, args=(pip.stdout, said), daemon=True)
        reader.start()
        moved, size = time.monotonic(), 0
        try:
            while pip.poll() is None or reader.is_alive() or not said.empty():
                for line in _drain(said):
                    lines.append(line)
                    moved = time.monotonic()
                now = sum(_sizes(folders))
                if now != size:
                    size, moved = now, time.monotonic()
                started = sum(line.startswith(("Collecting ", "Saved ")) for line in lines)
                progress("fetching wheels", min(started, files), files, "wheels")
                if size:
                    progress("fetched", size, None, "B")
                if time.monotonic() - moved > SILENCE:
                    lines.append("ERROR: Read timed out\n")
                    pip.kill()
                    break
        finally:
            if pip.poll() is None:
                pip.kill()
        return pip.wait(), "".join(lines)


def _listen(stream: IO[str], said: queue.Queue[str]) -> None:
    for line in stream:
        said.put(line)


def _drain(said: queue.Queue[str]) -> Iterator[str]:
    try:
        yield said.get(timeout=_POLL)
        while True:
            yield said.get_nowait()
    except queue.Empty:
        return


def _sizes(folders: Sequence[Path]) -> Iterator[int]:
    for folder in folders:
        for base, _, names in os.walk(folder):
            for name in names:
                try:
                    yield os.lstat(os.path.join(base, name)).st_size  # noqa: PTH118
                except OSError:
                    continue


def explain(output: str, target: Target, files: int) -> OrchError:
    """pip's failure in one sentence."""
    output = _CREDENTIALS.sub(r"\1", output)
    wrong = _MISMATCH.search(output)
    if wrong:
        file = (wrong.group(2) or wrong.group(1)).split("#")[0].rsplit("/", 1)[-1]
        file = unquote(file)
        return WrongHash(
            f"{file} as it was fetched has sha256 {wrong.group(3)}, which is none of those that requirements.lock "
            f"or the index gives for {wrong.group(1)}: it is not the file that was meant, and nothing of it is used"
        )
    if "No space left on device" in output:
        return OrchError(
            "this machine's disk, where its wheel store is, is full", hint="ORCH_CACHE_DIR names another folder"
        )
    missing = _MISSING.search(output)
    what = (missing.group(1) or missing.group(2)) if missing else ""
    if _CERTIFICATE.search(output):
        return Offline("the package index's certificate is not trusted: pip's `cert` setting names a bundle that is")
    if _NETWORK.search(output):
        reason = next((text for pattern, text in _REASONS if pattern.search(output)), "the connection fails")
        count = "1 wheel is" if files == 1 else f"{files} wheels are"
        return Offline(
            f"the package index cannot be reached ({reason}), and {count} not in this machine's store"
            f"{f', {what} first' if what else ''}",
            hint="run it again with a network, or with the store of a machine that has them (ORCH_CACHE_DIR)",
        )
    if what:
        name, _, version = what.partition("==")
        return NoWheel(
            f"there is no wheel of {name}{f' {version}' if version else ''} for {target}: the indexes "
            "that pip asks have it for other platforms only, as source only, or not at all"
        )
    said = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR:")] or said
    return OrchError(f"pip could not fetch the wheels: {errors[-1] if errors else 'it said nothing'}"[:600])
