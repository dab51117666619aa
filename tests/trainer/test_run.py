"""Whole runs as a user starts them: contract, kills and resuming, signals, divergence; and the shipped assets."""

import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from orchestrator.diagnosis import collect, reading
from orchestrator.diagnosis.rules import diagnose
from orchestrator.remote import evidence_log, evidence_metrics
from tests.trainer import forked
from tests.trainer.ranked import eventually
from trainer import cli, loop
from trainer.checkpoint import Saver
from trainer.data.batches import order

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "trainer" / "configs" / "demo.yaml"
ASSETS = ROOT / "trainer" / "assets" / "demo"
SMALL = (
    "threads=1", "steps=6", "data.rows_per_step=1", "loss.anchors_per_row=8", "evaluate.new_tokens=8",
    "checkpoint.every=3", "checkpoint.keep=9", "evaluate.every=4", "evaluate.every_prompts=2", "print_every=2",
)  # fmt: skip


def command(config: Path = DEMO, *overrides: str) -> list[str]:
    sets = [word for text in overrides for word in ("--set", text)]
    return ["train", str(config), *sets]


def environment(run_dir: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "ORCH_METRICS"}
    return {**inherited, "ORCH_RUN_DIR": str(run_dir)}


def started(arguments: list[str], run_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=ROOT,
        env=environment(run_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(arguments: list[str], run_dir: Path) -> tuple[int, str]:
    process = started(arguments, run_dir)
    said, _ = process.communicate(timeout=200)
    return process.returncode, said


def few_prompts(folder: Path) -> str:
    path = folder / "prompts.json"
    path.write_text(json.dumps(json.loads((ASSETS / "prompts.json").read_text())[:3]))
    return f"evaluate.prompts={path}"


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(run_dir) if "loss" in record]


def last_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Everything that the newest checkpoint holds."""
    path = max((run_dir / "checkpoints").glob("step-*"))
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in names.items()}
    with warnings.catch_warnings():  # one process is what we have
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return {"step": torch.tensor(int(path.name[5:])), **tensors}


def assert_same_end(run_dir: Path, whole: Path) -> None:
    """A step may have been taken more than once; each time and at the end not one bit differs."""
    expected = dict(losses(whole))
    assert dict(losses(run_dir)).keys() == expected.keys()
    assert all(loss == expected[step] for step, loss in losses(run_dir))
    ours, theirs = last_tensors(run_dir), last_tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_keeps_the_contract_and_a_killed_one_comes_to_the_same(tmp_path):
    sets = [*SMALL, few_prompts(tmp_path), "seed=0"]
    whole = tmp_path / "whole"
    code, said = finished(command(DEMO, *sets), whole)
    assert code == 0, said
    steps = [record for record in records(whole) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        assert {"step", "loss", "tokens", "time", "lr", "grad_norm", "spans"} <= set(record)
        assert record["tokens"] == 256 and abs(record["time"] - time.time()) < 600
        assert {"wait", "target", "mask", "forward", "loss", "backward", "norm", "optimizer"} <= set(record["spans"])
    evaluations = [record["eval"] for record in records(whole) if "eval" in record]
    assert len(evaluations) == 3  # before, at step 4, after
    assert {"headline", "temperature_0", "temperature_0.7"} <= set(evaluations[0])
    written = json.loads((whole / "result.json").read_text())
    assert written["steps"] == 6 and written["equal_to_plain"]["all"] and written["equal_to_plain"]["prompts"] == 3
    assert written["equal_to_plain"]["smallest_margin"] > 0
    for which in ("start", "end", "ngram"):
        assert 1 <= written[which]["temperature_0"]["tau"] <= 4
        assert 0 <= written[which]["temperature_0.7"]["repeat_8gram_share"] <= 1
    assert "n-gram" in said and "headline" in said

    killed = tmp_path / "killed"
    process = started(command(DEMO, *sets), killed)
    for line in process.stdout:
        if line.startswith("step 4/6"):
            eventually((killed / "checkpoints" / "step-000003").is_dir)  # a thread writes it
            process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    code, said = finished(command(DEMO, *sets), killed)
    assert code == 0 and "resuming after step 3" in said
    assert_same_end(killed, whole)
    again = json.loads((killed / "result.json").read_text())
    figures = ("tau", "rounds", "repeat_8gram_share", "equal_to_plain", "accepted_share")
    for which in ("start", "end", "ngram"):
        for name in ("temperature_0", "temperature_0.7"):
            assert all(again[which][name][each] == written[which][name][each] for each in figures)

    checkpoint = str(killed / "checkpoints" / "step-000006")
    code, said = finished(["evaluate", str(DEMO), "--checkpoint", checkpoint, *command(DEMO, *sets[-2:])[2:],
                           "--set", "evaluate.new_tokens=8"], tmp_path)  # fmt: skip
    assert code == 0 and "step 6: tau" in said and "n-gram drafter: tau" in said
    assert f"{written['end']['temperature_0']['tau']:.3f}" in said


TINY = """
name: tiny
steps: {steps}
device: cpu
attention: dense
threads: 1
print_every: 5
target: {{path: {target}}}
data: {{paths: {data}, row_length: 32, rows_per_step: 4}}
drafter: {{mask_token: 1, target_layers: [0, 2], layers: 1, block_size: 4}}
loss: {{anchors_per_row: 8, gamma: 2, chunk: 64}}
checkpoint: {{every: 1}}
"""
WHOLE = 32  # tokens of a document that fills a row
Tiny = Callable[..., Path]


@pytest.fixture
def tiny(small_target, tmp_path) -> Tiny:
    """A function that writes documents and a configuration; runs of it take a fraction of a second."""

    def make(documents: list[dict] | None = None, *, steps: int = 12, target: Path | None = None) -> Path:
        data, path = tmp_path / "documents.jsonl", tmp_path / "tiny.yaml"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents or some_documents(40)))
        path.write_text(TINY.format(steps=steps, target=target or small_target(), data=data))
        return path

    return make


def some_documents(count: int, *, least: int = 8, without: int = 0) -> list[dict]:
    draw = random.Random(0)
    tokens = [token for token in range(2, 96) if token != without]
    made = [[draw.choice(tokens) for _ in range(draw.randint(least, WHOLE))] for _ in range(count)]
    return [{"input_ids": ids, "loss_mask": [0, 0, *[1] * (len(ids) - 2)]} for ids in made]


def run(arguments: list[str], run_dir: Path, **how: int) -> tuple[int, str]:
    """To its end; -> exit code, and what this attempt said."""
    log = run_dir.with_suffix(".log")
    before = len(log.read_text()) if log.exists() else 0
    process = forked.start(arguments, run_dir=run_dir, log=log, **how)
    process.join(100)
    assert process.exitcode is not None
    return process.exitcode, log.read_text()[before:]


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def being_written(run_dir: Path, pattern: str = "") -> bool:
    return any((run_dir / "checkpoints").glob(f".partial-*/{pattern}"))


MOMENTS = (  # of a kill
    lambda run_dir: being_written(run_dir, "*.distcp"),
    lambda run_dir: True,
    being_written,
    lambda run_dir: being_written(run_dir, "state.json"),
)
OPTIMIZERS = {
    "muon, wsd": [],
    "adamw, cosine, moving average, two micro-batches": [
        "optimizer.kind=adamw",
        "optimizer.schedule=cosine",
        "optimizer.ema=0.9",
        "optimizer.weight_decay=0.1",
        "data.micro_batches=2",
        "dtype=bfloat16",
        "loss.weights=dpace",
        "loss.kl=0.5",
    ],
}


@pytest.mark.parametrize("sets", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_killed_at_random_and_resumed_comes_to_the_same(tiny, tmp_path, sets):
    """kill -9 between any two instructions, and while checkpoints are written: one is written at every step."""
    draw = random.Random(7)
    arguments = command(tiny(steps=18), *sets)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, said = run(arguments, whole)
    assert code == 0, said
    left_behind, kills, codes = 0, 0, []
    while not codes or codes[-1] != 0:
        target, moment = steps_done(killed) + draw.randint(1, 3), MOMENTS[kills % len(MOMENTS)]
        process = forked.start(arguments, run_dir=killed, log=tmp_path / "killed.log")
        while process.is_alive() and not (steps_done(killed) >= target and moment(killed)):
            time.sleep(0.0005)
        number = signal.SIGKILL if kills % 4 != 1 else signal.SIGTERM
        forked.send(process, number)
        codes.append(process.exitcode)
        kills += 1
        left_behind += being_written(killed)
        assert process.exitcode in (-signal.SIGKILL, 128 + signal.SIGTERM, 0), (tmp_path / "killed.log").read_text()
    assert codes.count(-signal.SIGKILL) >= 2 and 143 in codes and left_behind >= 1, codes
    assert_same_end(killed, whole)
    if sets:
        assert {"model", "average", "adam"} == {name.split(".")[0] for name in last_tensors(killed)} - {"step"}


def test_sigterm_saves_and_leaves_with_143(tiny, tmp_path):
    process = started(command(tiny(steps=100000), "checkpoint.every=100000"), tmp_path / "run")
    assert process.stdout.readline().startswith("train tiny")
    for line in process.stdout:
        if line.startswith("step 5/"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(timeout=30) == 143 and "stopped by signal 15" in rest
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = json.loads((saved / "state.json").read_text())["step"]
    assert step >= 5 and losses(tmp_path / "run")[-1][0] == step


def test_sigterm_during_an_evaluation_does_not_wait_for_its_end(tiny, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"tokens": [5, 6, 7]}]))
    arguments = command(tiny(), f"evaluate.prompts={prompts}", "evaluate.new_tokens=450")
    log, run_dir = tmp_path / "run.log", tmp_path / "run"
    process = forked.start(arguments, run_dir=run_dir, log=log)
    while "ready after" not in (log.read_text() if log.exists() else ""):
        assert process.is_alive()
        time.sleep(0.01)
    time.sleep(0.2)
    forked.send(process, signal.SIGTERM)
    assert process.exitcode == 143 and "before training" not in log.read_text()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000000"]
    code, said = run([*arguments, "--set", "evaluate.new_tokens=4"], run_dir)
    assert code == 0 and "before training, 1 prompts" in said and len(losses(run_dir)) == 12


def test_rows_without_anchors_take_their_step(tiny, tmp_path):
    lonely = {"input_ids": list(range(2, 2 + WHOLE)), "loss_mask": [0] * 9 + [1] + [0] * (WHOLE - 10)}
    documents = [*some_documents(6, least=WHOLE), lonely, lonely]
    run_dir = tmp_path / "run"
    code, said = run(command(tiny(documents, steps=16), "data.rows_per_step=1", "checkpoint.every=100"), run_dir)
    assert code == 0, said
    steps = records(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 17))
    without = [record for record in steps if record["loss"] is None]
    assert len(without) == 4 and all(record["grad_norm"] == 0 for record in without)
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in steps if record not in without)
    assert evidence_metrics.summary(str(run_dir / "metrics.jsonl"))["nan_step"] is None


def causes(run_dir: Path, log: Path) -> set[str]:
    """What the orchestrator calls it: by the log alone, and by the metrics beside it."""
    summary = evidence_metrics.summary(str(run_dir / "metrics.jsonl"))
    asked = collect.request()
    found = evidence_log.scan(str(log), asked["rules"], asked["prefix"])
    answer = {"run": "r", "log": found, "phase": "failed", "state": {"exit": {"code": 1}}, "metrics": summary}
    return {diagnose(collect.of_file(str(log))).cause, diagnose(reading.facts(answer, "here", {}, {})).cause}


def with_a_hole(target: Path, folder: Path) -> tuple[Path, int]:
    """A copy of a target in which the embedding of one token is no number; -> it and the token."""
    checked = torch.randint(96, (4 * WHOLE,), generator=torch.Generator().manual_seed(0))[: 2 * WHOLE].tolist()
    token = next(token for token in range(2, 96) if token not in checked)  # the check of isolation does not meet it
    for path in target.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_tensors(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, token


def test_a_loss_that_is_no_number_stops_before_the_update(tiny, small_target, tmp_path):
    (tmp_path / "target").mkdir()
    target, token = with_a_hole(small_target(), tmp_path / "target")
    documents = some_documents(8, least=WHOLE, without=token)
    documents[int(order(0, 5, rows=8, rows_per_step=1))]["input_ids"][3] = token
    arguments = command(tiny(documents, target=target), "data.rows_per_step=1", "checkpoint.every=3")
    run_dir = tmp_path / "run"
    code, said = run(arguments, run_dir)
    assert code == 1 and "Traceback" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert error.startswith("error: the loss is nan at step 6; stopped before the update")
    assert losses(run_dir)[-2][0] == 5 and records(run_dir)[-1]["loss"] == "nan"
    assert causes(run_dir, tmp_path / "run.log") == {"nan-loss"}
    stopped = last_tensors(run_dir)
    assert stopped["step"] == 5 and all(tensor.isfinite().all() for tensor in stopped.values())
    code, said = run(arguments, run_dir)  # it comes to the same place
    assert code == 1 and "resuming after step 5" in said and error in said
    assert all(torch.equal(tensor, stopped[name]) for name, tensor in last_tensors(run_dir).items())


def test_a_loss_that_leaps_stops_and_can_be_let_pass(tiny, tmp_path):
    still = ("optimizer.muon_rate=0", "optimizer.adam_rate=0", "data.rows_per_step=1", "checkpoint.every=100")
    arguments, run_dir = command(tiny(steps=60), "spike=1.001", *still), tmp_path / "run"
    code, said = run(arguments, run_dir)
    assert code == 1 and "Traceback" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    step = int(re.search(r"the loss has diverged: .* at step (\d+), more than 1.001 times the median", error)[1])
    assert step > 20 and last_tensors(run_dir)["step"] == step - 1
    assert causes(run_dir, tmp_path / "run.log") == {"loss-diverged"}
    code, said = run(arguments, run_dir)
    assert code == 1 and f"resuming after step {step - 1}" in said and error in said
    code, said = run([*arguments, "--set", "spike=0"], run_dir)
    assert code == 0 and losses(run_dir)[-1][0] == 60


@pytest.fixture
def in_process(capfd) -> Callable[[list[str], Path], tuple[int, str]]:
    """Like `run`, in this process, where parts can be replaced."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(arguments: list[str], run_dir: Path) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ORCH_RUN_DIR", str(run_dir))
            patch.delenv("ORCH_METRICS", raising=False)
            code = cli.main(arguments)
        said = "".join(capfd.readouterr())
        run_dir.with_suffix(".log").write_text(said)
        return code, said

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_gradient_that_is_no_number_stops_too(tiny, tmp_path, in_process, monkeypatch):
    compute = loop.compute_gradient

    def broken(*arguments, **more):
        gradient = compute(*arguments, **more)
        return dataclasses.replace(gradient, norm=gradient.norm * float("inf"))

    monkeypatch.setattr(loop, "compute_gradient", broken)
    code, said = in_process(command(tiny(), "steps=3"), tmp_path / "run")
    assert code == 1 and "error: the loss has diverged: the gradient's norm is inf at step 1" in said
    assert last_tensors(tmp_path / "run")["step"] == 0
    assert diagnose(collect.of_file(str(tmp_path / "run.log"))).cause == "loss-diverged"


def test_checkpoints_that_cannot_be_written_do_not_stop_training(tiny, tmp_path):
    """Files may not grow beyond a few KB, as on a full disk."""
    arguments, run_dir = command(tiny()), tmp_path / "run"
    code, said = run(arguments, run_dir, largest_file=30_000)
    assert code == 1 and "Traceback" not in said, said
    lines = said.splitlines()
    warned = [line for line in lines if line.startswith("warning:")]
    assert len(warned) == 11 and all("training goes on" in line and "File too large" in line for line in warned)
    (error,) = [line for line in lines if line.startswith("error:")]
    assert "could not be written" in error
    assert len(losses(run_dir)) == 12 and not list((run_dir / "checkpoints").iterdir())
    code, said = run(arguments, run_dir)
    assert code == 0 and "resuming" not in said
    code, _ = run(arguments, tmp_path / "whole")
    assert_same_end(run_dir, tmp_path / "whole")


def test_after_a_failed_checkpoint_the_next_one_is_written(tiny, tmp_path, in_process, monkeypatch):
    write, tried = Saver._write, []

    def failing(saver, final, state):
        tried.append(final.name)
        if len(tried) in (2, 4):
            saver._failure = OSError("no")
        else:
            write(saver, final, state)

    monkeypatch.setattr(Saver, "_write", failing)
    code, said = in_process(command(tiny(steps=5), "checkpoint.keep=9"), tmp_path / "run")
    assert code == 0 and said.count("warning:") == 2
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000003", "step-000005"] and len(tried) == 5


def test_broken_data_ends_in_one_sentence(tiny, tmp_path):
    broken = tmp_path / "rows.safetensors"
    broken.write_bytes((ASSETS / "rows.safetensors").read_bytes()[:5000])
    code, said = run(command(tiny(), f"data.paths={broken}"), tmp_path / "run")
    assert code == 1 and "Traceback" not in said
    assert f"error: {broken}: not a readable safetensors file" in said
    code, said = run(command(tiny([*some_documents(3), {"input_ids": [5, 96]}])), tmp_path / "run")
    assert code == 1 and "Traceback" not in said
    assert re.search(r"error: 1 of 4 records cannot be used.*documents\.jsonl:4", said)
    code, said = run(
        command(tiny([*some_documents(3), {"input_ids": [5, 96]}]), "data.broken_share=0.5"), tmp_path / "run"
    )
    assert code == 0 and "warning: skipped 1 of 4 records" in said


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
