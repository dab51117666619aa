"""Records really arrive in TensorBoard's and W&B's own files, and a missing package is said in one sentence."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.config import Config, DataConfig, DrafterConfig, ReportConfig, TargetConfig
from trainer.errors import TrainerError
from trainer.trackers import Trackers

BLOCK = 1 << 15
RECORDS = (
    {"step": 0, "time": 1.0, "eval": {"prompts": 3, "temperature_0": {"tau": 1.5, "rule": "match"}}},
    {"step": 1, "time": 2.0, "loss": 4.5, "tokens": 256, "spans": {"wait": 0.25, "loss": 0.5}, "accuracy": [0.5]},
    {"step": 2, "time": 3.0, "loss": float("nan"), "tokens": 250, "spans": {"wait": 0.125}, "fine": True},
    {"step": 3, "time": 3.5, "loss": "nan", "grad_norm": 2.0},
)
WRITTEN = {  # numbers only, under their own names
    ("eval/prompts", 0, 3.0),
    ("eval/temperature_0/tau", 0, 1.5),
    ("loss", 1, 4.5),
    ("tokens", 1, 256.0),
    ("spans/wait", 1, 0.25),
    ("spans/loss", 1, 0.5),
    ("tokens", 2, 250.0),
    ("spans/wait", 2, 0.125),
    ("grad_norm", 3, 2.0),
}


def configured(**report) -> Config:
    return Config(
        name="tracked",
        steps=3,
        target=TargetConfig(path=Path()),
        data=DataConfig(paths=()),
        drafter=DrafterConfig(mask_token=1),
        report=ReportConfig(**report),
    )


def report(run_dir: Path, records=RECORDS, **settings) -> list[dict]:
    """-> what metrics.jsonl holds then."""
    trackers = Trackers(configured(**settings), run_dir=run_dir, metrics_path=run_dir / "metrics.jsonl")
    for record in records:
        trackers.append(record)
    trackers.close()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_written_line_by_line_and_appended_to(tmp_path):
    lines = report(tmp_path)
    assert lines[1] == RECORDS[1] and lines[3] == RECORDS[3]
    assert lines[2] == {**RECORDS[2], "loss": None}  # JSON has no NaN
    assert report(tmp_path, RECORDS[:1]) == [*lines, RECORDS[0]]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_tensorboard_reads_its_files_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(report(tmp_path, tensorboard=True)) == len(RECORDS)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {(tag, e.step, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert {entry for entry in found if entry[2] == entry[2]} == WRITTEN
    assert [(tag, step) for tag, step, value in found if value != value] == [("loss", 2)]


def test_wandb_reads_an_offline_run_back(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = tmp_path / "20300101-run"
    run_dir.mkdir()
    assert len(report(run_dir, wandb="offline", wandb_project="mine")) == len(RECORDS)
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 60
    while not any(entry.HasField("exit") for entry in wandb_records(file)):  # W&B 0.31 does not wait for its writer
        assert time.monotonic() < end, file.stat().st_size
        time.sleep(0.1)
    found, run = set(), None
    for entry in wandb_records(file):
        if entry.HasField("run"):
            run = entry.run
        if entry.HasField("history"):
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item}
            found |= {(name, values["_step"], value) for name, value in values.items() if not name.startswith("_")}
    assert (run.project, run.display_name, run.run_id) == ("mine", "tracked", run_dir.name)
    assert {(name, step, value) for name, step, value in found if value == value and value != "NaN"} == WRITTEN
    assert {path.name for path in run_dir.iterdir()} == {"metrics.jsonl", "wandb"}


def wandb_records(file: Path) -> Iterator:
    """Protocol buffers in LevelDB's log format: after 7 bytes of W&B's own, blocks of 32 KiB that hold pieces, each
    behind its checksum (4 bytes), its length (2) and its kind (1): whole, first, middle or last of a record."""
    from wandb.proto import wandb_internal_pb2

    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):
            return  # it is still being written
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(record)
            yield entry
            record = b""


@pytest.mark.parametrize(
    ("package", "settings", "said"),
    [("tensorboard", {"tensorboard": True}, "tensorboard: true"), ("wandb", {"wandb": "offline"}, "wandb: offline")],
)
def test_a_missing_package_is_said_in_one_sentence(tmp_path, monkeypatch, package, settings, said):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    with pytest.raises(
        TrainerError, match=rf"report\.{said} needs the package {package}, which this environment lacks"
    ):
        report(tmp_path, **settings)
