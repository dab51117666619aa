"""Whole runs as a user starts them: contract, resume, signals; and the shipped assets."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "trainer" / "configs" / "demo.yaml"
ASSETS = ROOT / "trainer" / "assets" / "demo"
SMALL = (
    "steps=6", "data.rows_per_step=1", "loss.anchors_per_row=8", "evaluate.new_tokens=8", "checkpoint.every=3",
    "checkpoint.keep=9", "evaluate.every=4", "evaluate.every_prompts=2", "print_every=2",
)  # fmt: skip


def command(*overrides: str, seed: int = 0) -> list[str]:
    sets = [word for text in (*SMALL, *overrides) for word in ("--set", text)]
    return [sys.executable, "-m", "trainer", "train", str(DEMO), "--seed", str(seed), *sets]


def environment(run_dir: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "ORCH_METRICS"}
    return {**inherited, "ORCH_RUN_DIR": str(run_dir)}


def few_prompts(folder: Path) -> str:
    path = folder / "prompts.json"
    path.write_text(json.dumps(json.loads((ASSETS / "prompts.json").read_text())[:3]))
    return f"evaluate.prompts={path}"


def train(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*overrides),
        cwd=ROOT,
        env=environment(run_dir),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_keeps_the_contract_and_resumes_bit_by_bit(tmp_path):
    prompts = few_prompts(tmp_path)
    whole = tmp_path / "whole"
    result = train(whole, prompts)
    assert result.returncode == 0, result.stderr
    steps = [record for record in records(whole) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        assert {"step", "loss", "tokens", "time", "lr", "grad_norm", "spans"} <= set(record)
        assert record["tokens"] == 256 and abs(record["time"] - time.time()) < 600
    evaluations = [record["eval"] for record in records(whole) if "eval" in record]
    assert len(evaluations) == 3  # before, at step 4, after
    assert {"headline", "temperature_0", "temperature_0.7"} <= set(evaluations[0])
    written = json.loads((whole / "result.json").read_text())
    assert written["steps"] == 6 and written["equal_to_plain"]["all"] and written["equal_to_plain"]["prompts"] == 3
    assert written["equal_to_plain"]["smallest_margin"] > 0
    for which in ("start", "end", "ngram"):
        assert 1 <= written[which]["temperature_0"]["tau"] <= 4
        assert 0 <= written[which]["temperature_0.7"]["repeat_8gram_share"] <= 1
    assert "n-gram" in result.stdout and "headline" in result.stdout

    # the first half again, then the second half from its checkpoint: not one bit differs
    half = tmp_path / "half"
    (half / "checkpoints").mkdir(parents=True)
    (whole / "checkpoints" / "step-000003").rename(half / "checkpoints" / "step-000003")
    result = train(half, prompts)
    assert result.returncode == 0 and "resuming after step 3" in result.stdout
    names = [run / "checkpoints" / "step-000006" / "drafter.safetensors" for run in (whole, half)]
    first, second = (load_file(path) for path in names)
    assert all(np.array_equal(first[name], second[name]) for name in first) and first.keys() == second.keys()
    losses = [[r["loss"] for r in records(run) if "loss" in r][-3:] for run in (whole, half)]
    assert losses[0] == losses[1]

    evaluate = subprocess.run(
        [sys.executable, "-m", "trainer", "evaluate", str(DEMO), "--checkpoint", str(names[1].parent),
         "--set", prompts, "--set", "evaluate.new_tokens=8"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert evaluate.returncode == 0 and "step 6: tau" in evaluate.stdout and "n-gram drafter: tau" in evaluate.stdout


def test_sigterm_saves_and_leaves_with_143(tmp_path):
    process = subprocess.Popen(
        command(few_prompts(tmp_path), "steps=100000", "checkpoint.every=100000", "evaluate.every=0"),
        cwd=ROOT,
        env=environment(tmp_path / "run"),
        stdout=subprocess.PIPE,
        text=True,
    )
    began = time.monotonic()
    assert process.stdout.readline().startswith("train demo")
    assert time.monotonic() - began < 10
    for line in process.stdout:
        if line.startswith("step 4/"):
            break
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    rest = process.stdout.read()
    assert process.wait(timeout=30) == 143 and time.monotonic() - sent < 20
    assert "stopped by signal 15" in rest
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = json.loads((saved / "state.json").read_text())["step"]
    assert step >= 4 and [r for r in records(tmp_path / "run") if "loss" in r][-1]["step"] == step


def test_broken_data_ends_in_one_sentence(tmp_path):
    broken = tmp_path / "rows.safetensors"
    broken.write_bytes((ASSETS / "rows.safetensors").read_bytes()[:5000])
    result = train(tmp_path / "run", f"data.path={broken}")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"error: {broken}: not a readable safetensors file" in result.stderr


def test_assets_are_those_of_the_manifest():
    manifest = json.loads((ASSETS / "manifest.json").read_text())
    files = {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file()} - {"manifest.json"}
    assert files == set(manifest["sha256"])
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest, name
    assert (ASSETS / "target" / "model.safetensors").stat().st_size <= 6e6
    assert (ASSETS / "target" / "tokenizer.json").stat().st_size <= 100e3
    assert (ASSETS / "rows.safetensors").stat().st_size <= 1e6


def test_held_out_files_are_kept_out():
    manifest = json.loads((ASSETS / "manifest.json").read_text())
    held_out = set(manifest["held_out_files"])
    prompts = json.loads((ASSETS / "prompts.json").read_text())
    assert len(prompts) >= 32 and {prompt["file"] for prompt in prompts} <= held_out
    assert not held_out & set(manifest["rows"]["files"])
    assert "/root" not in (ASSETS / "manifest.json").read_text()
    rows = load_file(ASSETS / "rows.safetensors")
    assert rows["tokens"].dtype == np.uint16 and rows["tokens"].max() < 1024
