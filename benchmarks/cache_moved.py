"""What a compile cache is worth where it was moved: `trainer warmup` cold, then with the folder elsewhere as another
user from another environment of the same packages, with another setting, and with damaged files.

    python -m benchmarks.cache_moved [--cpu] [--folder /tmp/cache-moved] [--budget 480] [--json FILE]

Prints all figures as JSON and exits with 1 where one is not as expected. Each step is bounded; one that runs over is
asked for its stacks (SIGABRT, faulthandler) before it is killed. No step begins beyond the budget.
"""

import argparse
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHER = "cacheother"
SHAPE = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {**SHAPE, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}

MAKE = """
import json, sys, torch, transformers
torch.manual_seed(0)
config = transformers.Qwen3Config(**json.loads(sys.argv[2]))
transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
print("torch", torch.__version__, "transformers", transformers.__version__,
      torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
"""


def configuration(folder: Path, cpu: bool) -> str:
    return json.dumps(
        {  # JSON is YAML
            "name": "cache-moved",
            "steps": 10,
            "device": "cpu" if cpu else "cuda",
            "attention": "dense" if cpu else "flex",
            "compile": "on",
            "target": {"path": str(folder / "target")},
            "data": {"paths": str(folder / "data.jsonl"), "row_length": 128 if cpu else 4096, "rows_per_step": 1},
            "drafter": {
                "mask_token": 1, "layers": 3, "features": 3, "block_size": 16,
                "sliding_window": 32 if cpu else 1024, "sliding_layers": [0, 1],
            },
            "loss": {
                "kl": 0.5, "cross_entropy": 0.5, "anchors_per_row": 8 if cpu else 256, "chunk": 64 if cpu else 1024,
            },
        }
    )  # fmt: skip


class Steps:
    def __init__(self, folder: Path, code: Path, budget: float):
        self.folder, self.code, self.ends = folder, code, time.monotonic() + budget
        self.done: list[dict] = []
        self.wrong: list[str] = []

    def warmup(self, name: str, cache: Path, *, python: str = sys.executable, user: str | None = None,
               limit: float = 150, **variables: str) -> dict:  # fmt: skip
        if time.monotonic() > self.ends:
            print(f"== {name}: left out, the budget is used up", flush=True)
            self.done.append({"name": name, "left_out": True})
            return {}
        place = self.folder / "runs" / name
        place.mkdir(parents=True)
        for path in (place, *([] if user is None else [cache])):
            if user is not None:
                subprocess.run(["chown", "-R", f"{user}:", path], check=True)
        before = files(cache)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("TORCHINDUCTOR", "TRITON"))},
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "ORCH_RUN_DIR": str(place / "run"),
            "ORCH_METRICS": str(place / "metrics.jsonl"),
            "PYTHONPATH": os.pathsep.join([str(self.code), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            **({"HOME": pwd.getpwnam(user).pw_dir, "USER": user, "LOGNAME": user} if user else {}),
            **variables,
        }
        words = [python, "-X", "faulthandler", "-m", "trainer", "warmup", str(self.folder / "config.yaml")]
        if user is not None:
            words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *words]
        print(f"== {name}: {' '.join(words)}", flush=True)
        began = time.monotonic()
        with (place / "console.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=self.folder, env=environment, stdout=log, stderr=log)
            try:
                code = process.wait(min(limit, max(20, self.ends - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                code = "timed out"
        said = (place / "console.log").read_text(errors="replace").splitlines()
        metrics = place / "metrics.jsonl"
        told = (
            [t["compile"] for t in map(json.loads, metrics.read_text().splitlines()) if "compile" in t]
            if metrics.exists()
            else []
        )
        after = files(cache)
        new = sorted(after - before)
        kinds = (".so", ".best_config", ".cubin", ".py")
        found = {
            "name": name,
            "exit": code,
            "wall": round(time.monotonic() - began, 1),
            "done": next((each for each in told if "done" in each), None),
            "graphs": [each for each in told if "graph" in each],
            "files_before": len(before),
            "files_after": len(after),
            "new": {kind: sum(path.endswith(kind) for path in new) for kind in kinds},
            "bytes": sum((cache / path).stat().st_size for path in after),
        }
        print("\n".join(said[-60 if code else -16 :]), flush=True)
        print(json.dumps(found), flush=True)
        if new and before:
            print("new:", new[:12], flush=True)
        self.done.append(found)
        return found

    def expect(self, found: dict, what: str, holds: bool) -> None:
        if found and not holds:
            self.wrong.append(f"{found['name']}: {what}")

    def warm(self, found: dict) -> None:
        done = found.get("done") or {}
        self.expect(found, "exits with 0", found.get("exit") == 0)
        self.expect(found, "no miss", done.get("misses") == 0 and done.get("hits", 0) > 0)
        self.expect(found, "nothing rebuilt", done.get("rebuilt") == 0)


def files(cache: Path) -> set[str]:
    return {
        str(path.relative_to(cache))
        for path in cache.rglob("*")
        if path.is_file() and "locks" not in path.parts and path.suffix != ".lock"
    }


def another_environment(folder: Path) -> str:
    """Of the same packages, at another path."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder], check=True)
    if sys.prefix != sys.base_prefix:  # this one is such an environment itself
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "same.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return str(folder / "bin" / "python")


def another_user(python: str) -> str | None:
    """One who can run this Python; None for the same."""
    user = _made_user()
    trial = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    if user is not None:
        words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", python, "-c", trial]
        home = {**os.environ, "HOME": pwd.getpwnam(user).pw_dir}
        tried = subprocess.run(words, check=False, capture_output=True, text=True, env=home, cwd="/", timeout=120)
        if tried.returncode:
            print(f"{user} cannot run {python}: the same user instead\n{tried.stderr[-600:]}", flush=True)
            return None
    return user


def _made_user() -> str | None:
    if os.getuid():
        print("not root: the same user", flush=True)
        return None
    try:
        pwd.getpwnam(OTHER)
    except KeyError:
        made = subprocess.run(["useradd", "-m", OTHER], check=False)
        if made.returncode:
            print("useradd failed: nobody", flush=True)
            return "nobody"
    return OTHER


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/cache-moved"))
    parser.add_argument("--budget", type=float, default=480, help="seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    code = folder / "code"  # where another user can read it, too
    shutil.copytree(ROOT / "trainer", code / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a+rX", code], check=True)
    shape = SMALL if options.cpu else SHAPE
    subprocess.run([sys.executable, "-c", MAKE, folder / "target", json.dumps(shape)], check=True, timeout=120)
    subprocess.run(["chmod", "-R", "a+rX", folder / "target"], check=True)
    (folder / "data.jsonl").write_text('{"text": "warmup reads none of it"}\n')
    (folder / "config.yaml").write_text(configuration(folder, options.cpu))
    steps = Steps(folder, code, options.budget)

    cache = folder / "first" / "cache"
    cold = steps.warmup("cold", cache, limit=240)
    done = cold.get("done") or {}
    steps.expect(cold, "exits with 0", cold.get("exit") == 0)
    steps.expect(cold, "misses, no hit", done.get("misses", 0) > 0 and done.get("hits") == 0)
    if cold.get("exit") != 0:
        return report(steps, options.json)
    elsewhere = folder / "quite" / "another" / "place"
    elsewhere.parent.mkdir(parents=True)
    shutil.copytree(cache, folder / "kept", symlinks=True)
    cache.rename(elsewhere)
    python = another_environment(folder / "environments" / "b")
    user = another_user(python)
    steps.done.append({"user": user, "python": python})
    steps.warm(steps.warmup("moved-user-environment", elsewhere, python=python, user=user))
    steps.warm(steps.warmup("same-user-moved", shutil.copytree(folder / "kept", folder / "again")))
    tuned = steps.warmup(
        "max-autotune", shutil.copytree(folder / "kept", folder / "tuned"), limit=200, TORCHINDUCTOR_MAX_AUTOTUNE="1"
    )
    steps.expect(tuned, "misses", ((tuned.get("done") or {}).get("misses") or 0) > 0)

    # what damage does; nothing is expected but an end
    for name, pattern, content in (
        ("best-config-junk", "inductor/**/*.best_config", b'{"a": '),
        ("triton-so-empty", "triton/**/*.so", b""),
        ("triton-cubin-cut", "triton/**/*.cubin", b"\x7fELF"),
        ("triton-json-cut", "triton/**/*.json", b'{"a": '),
        ("entries-cut", "inductor/fxgraph/**/*", b"\x80"),
    ):
        damaged = folder / name
        shutil.copytree(folder / "kept", damaged)
        hit = [path for path in damaged.glob(pattern) if path.is_file()]
        for path in hit:
            path.write_bytes(content)
        print(f"-- {name}: {len(hit)} files", flush=True)
        if hit:
            steps.warmup(name, damaged, limit=90)
    return report(steps, options.json)


def report(steps: Steps, path: Path | None) -> int:
    text = json.dumps({"steps": steps.done, "wrong": steps.wrong}, indent=1)
    if path is not None:
        path.write_text(text)
    print(text)
    print("as expected" if not steps.wrong else "NOT as expected: " + "; ".join(steps.wrong))
    return 1 if steps.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
