"""What it costs to have a compile cache in a container: orch's staging, and `tar | zstd | ssh | pct exec tar` by hand.

    python -m benchmarks.cache_staging [--times 5] [--megabytes 350] [--files 5000] [--encoding zstd|gzip|plain]

makes a cache of generated code, pickles and binaries, says how far zstd packs it, brings up the lab of tests/lab
(root, LXC and sshd on loopback), and brings the cache into a container by both ways in turn. Each time of orch's is a
process of its own, from opening the connection to the snapshot in place with every digest checked; its peak of memory
is the kernel's VmHWM. The cache lies packed in the workstation's store, as `orch cache pull` leaves it; how long that
took is told too. By hand: zstd's default level, no digest, no rename.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VMID = "200"
# Shares of the files and of the bytes, and of the bytes what is noise: code is text, the others are partly packed
# or machine code.
KINDS = (("py", 0.5, 0.16, 0.12), ("pickle", 0.24, 0.20, 0.3), ("cubin", 0.18, 0.26, 0.45), ("so", 0.08, 0.38, 0.35))
WORDS = (
    "tl.load(in_ptr0 + (x0 + 128*x1), xmask, eviction_policy='evict_last')",
    "tmp{n} = tl.where(xmask, tmp{m}, float('-inf'))",
    "async_compile.triton('triton_tem_fused_flex_attention_{n}', '''",
    "buf{n} = empty_strided_cuda((1, 32, 4096, 128), (16777216, 524288, 128, 1), torch.bfloat16)",
    "#include <torch/csrc/inductor/cpp_prefix.h>",
    "for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>({n}L); x0+=static_cast<int64_t>(16L))",
)


def make(folder: Path, files: int, size: int) -> None:
    """A cache of about that many files and bytes, the same each time."""
    rng = random.Random(7)
    for kind, of_files, of_bytes, noise in KINDS:
        count = int(files * of_files)
        for number in range(count):
            name = f"{rng.getrandbits(256):051x}"
            path = folder / ("triton" if kind == "cubin" else "inductor") / name[:2] / f"c{name}.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            length = int(size * of_bytes / count * rng.uniform(0.4, 1.6))
            path.write_bytes(b"".join(content(rng, kind, length, noise, number)))
            path.chmod(0o755 if kind == "so" else 0o644)


def content(rng: random.Random, kind: str, length: int, noise: float, number: int) -> Iterator[bytes]:
    """Lines of code, or records of a few forms, with noise between them."""
    left = length
    while left > 0:
        if rng.random() < noise:
            piece = rng.randbytes(min(left, 256))
        elif kind == "py":
            text = "".join(f"    {rng.choice(WORDS)}\n".format(n=rng.randrange(999), m=number) for _ in range(4))
            piece = text.encode()[:left]
        else:
            record = rng.randbytes(24)
            piece = b"".join(record + rng.randbytes(2) + bytes(6) for _ in range(8))[:left]
        left -= len(piece)
        yield piece


# --- one time of each, the first in a process of its own -------------------------------------------


def stage(config: str, store: str, encoding: str) -> dict[str, Any]:
    """orch's way, as a launch goes it."""
    began = time.perf_counter()
    from orchestrator.compile_cache import staging
    from orchestrator.compile_cache.store import Store
    from orchestrator.config.models import Container, Host, Place, Ssh
    from orchestrator.place.session import open_session

    host = Host(
        name="pve",
        ssh=Ssh(host="pve", ssh_config=Path(config)),
        containers={VMID: Container(kind="pct", id=VMID)},
    )
    (one,) = Store(Path(store)).all()
    imported = time.perf_counter()
    with open_session(Place(host, VMID)) as session:
        opened = time.perf_counter()
        found = staging.ask(session, one.parts, None, "bench")
        can = found.programs if encoding == "zstd" else {}
        what = staging.sending(session, one, can, found.snapshots)
        if encoding == "plain":
            what = staging.Sending(what.stored, what.pack, what.lacking, "plain", "as asked")
        asked = time.perf_counter()
        sent = staging.stage(session, what)
        done = time.perf_counter()
        assert sent.how == "new" and staging.ask(session, one.parts, None, "bench").present == one.digest
    peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    told = {"import": imported - began, "open": opened - imported, "ask": asked - opened, "stream": done - asked}
    figures = {"seconds": done - imported, "parts": told, "sent": sent.bytes, "encoding": sent.encoding}
    return {**figures, "peak": int(peak) << 10, "cpu": time.process_time()}


def by_hand(config: str, folder: Path, target: str) -> float:
    """The line that one would type; seconds."""
    inside = shlex.join(["sh", "-c", f"mkdir -p {target} && zstd -dcq | tar -x -C {target}"])
    line = (
        f"tar -C {shlex.quote(str(folder))} -cf - . | zstd -cq | ssh -F {shlex.quote(config)} pve pct exec {VMID} -- "
    )
    began = time.perf_counter()
    subprocess.run(["bash", "-o", "pipefail", "-c", line + shlex.quote(inside)], check=True)
    return time.perf_counter() - began


def pack(folder: Path, store: Path) -> tuple[float, int, int]:
    """The cache in the workstation's store: seconds, bytes, bytes packed."""
    import hashlib

    from orchestrator.compile_cache.key import KeyParts
    from orchestrator.compile_cache.store import Store
    from orchestrator.remote import cache_files

    began = time.perf_counter()
    empty: dict[str, Any] = {"torch": "2.11.0", "torch_files": "", "triton": "3.6.0", "triton_files": "", "cuda": "cpu"}
    parts = KeyParts.read({**empty, "gpu": ["bench"], "environment_path": "", "instruction_set": []})
    rows = []
    with Store(store).adding(parts.digest, parts) as adding:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            rows.append([str(path.relative_to(folder)), len(data), digest, os.access(path, os.X_OK)])
            if digest not in adding.writer:
                adding.writer.add(digest, len(data), [data])
        manifest = cache_files.make_manifest(
            rows, **{"from": "bench", "parent": None, "made": 0.0, "cold_seconds": None}
        )
        one = adding.keep(manifest, {"recipe": "bench"}, "bench")
    return time.perf_counter() - began, one.bytes, one.packed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="of each way, in turn (default: 5)")
    parser.add_argument("--megabytes", type=float, default=350.0)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--encoding", choices=("zstd", "gzip", "plain"), default="zstd")
    parser.add_argument("--json", type=Path, help="write every figure there too")
    parser.add_argument("--one", nargs=2, metavar=("SSH_CONFIG", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(stage(*options.one, options.encoding)))
        return 0
    from tests.lab.conftest import start, stop

    with tempfile.TemporaryDirectory(prefix="orch-bench-") as text:
        folder = Path(text)
        make(folder / "cache", options.files, int(options.megabytes * 1e6))
        count = sum(path.is_file() for path in (folder / "cache").rglob("*"))
        seconds, size, packed = pack(folder / "cache", folder / "store")
        print(f"a cache of {count:,} files, {size / 1e6:.0f} MB: zstd -3 packs it to {packed / 1e6:.0f} MB")
        print(f"packed into the store, once: {seconds:.1f} s")
        lab = start()
        try:
            figures = alternate(lab, folder, size, options.times, options.encoding)
        finally:
            stop(lab.dir)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


def alternate(lab: Any, folder: Path, size: int, times: int, encoding: str) -> dict[str, Any]:
    """Both ways in turn, so that what else the machine does meets both; each into a folder of its own."""
    config = str(lab.ssh_config)
    argv = [sys.executable, "-m", "benchmarks.cache_staging", "--encoding", encoding, "--one", config]
    argv.append(str(folder / "store"))
    ours: list[dict[str, Any]] = []
    hand: list[float] = []

    def orch() -> None:
        done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True)
        ours.append(json.loads(done.stdout))

    def typed() -> None:
        hand.append(by_hand(config, folder / "cache", "/root/by-hand"))

    orch()  # brings orch's program there, and is not counted
    ours.clear()
    for number in range(times):
        for way in (orch, typed) if number % 2 else (typed, orch):
            lab.run("sh", "-c", "rm -rf /var/lib/orch/caches /root/by-hand; sync", vmid=VMID)
            way()
        told = ", ".join(f"{name} {value:.2f}" for name, value in ours[-1]["parts"].items())
        print(f"orch {ours[-1]['seconds']:.2f} s ({told}); by hand {hand[-1]:.2f} s", flush=True)
    seconds, by = statistics.median(one["seconds"] for one in ours), statistics.median(hand)
    ratio = statistics.median(typed / one["seconds"] for one, typed in zip(ours, hand, strict=True))
    peak, cpu = max(one["peak"] for one in ours), statistics.median(one["cpu"] for one in ours)
    print(f"orch     {size / 1e6 / seconds:6.1f} MB/s, {ours[0]['sent']:,} bytes on the way as {ours[0]['encoding']}")
    print(f"by hand  {size / 1e6 / by:6.1f} MB/s")
    print(f"ratio {ratio:.2f} (medians of {times}; both with their connection, orch's without its imports)")
    print(f"the workstation's process: peak memory {peak / 1e6:.0f} MB, {cpu:.1f} s of CPU time")
    return {"ours": ours, "by_hand": hand, "bytes": size, "ratio": ratio, "peak": peak}


if __name__ == "__main__":
    sys.exit(main())
