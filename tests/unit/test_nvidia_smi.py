"""Reading what nvidia-smi says, whatever it says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.remote import nvidia_smi, processes
from orchestrator.remote.nvidia_smi import KEYS, Query, explain, parse, parse_gpus, sample_line
from orchestrator.remote.sampler import Sampler

from .remote_runs import LAB_SMI, eventually

GOOD = "0, GPU-aa, 70000, 143771, 98, 61, 512.34, NVIDIA H200"


def test_a_good_line() -> None:
    assert parse_gpus(GOOD + "\n") == [
        {
            "index": 0,
            "uuid": "GPU-aa",
            "memory_used": 70000,
            "memory_total": 143771,
            "utilization": 98,
            "temperature": 61,
            "power": 512.34,
            "name": "NVIDIA H200",
            "why": {},
        }
    ]


@pytest.mark.parametrize(
    "excuse", ["[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "[Insufficient Permissions]", "N/A", ""]
)
def test_a_value_that_is_none_keeps_its_reason(excuse: str) -> None:
    (gpu,) = parse_gpus(f"3, GPU-aa, {excuse}, 143771, {excuse}, 61, {excuse}, Board")
    assert gpu["memory_used"] is gpu["utilization"] is gpu["power"] is None
    assert gpu["memory_total"] == 143771 and gpu["name"] == "Board"
    assert gpu["why"] == dict.fromkeys(("memory_used", "utilization", "power"), excuse.strip("[]") or "nothing")


def test_a_broken_line_costs_its_gpu_only() -> None:
    text = "\n".join([GOOD, "1, [GPU is lost]", "garbage", "2, GPU-cc, 1, 2, 3, 4, 5.5, Odd, Board, with commas"])
    gpus, problems = parse(text)
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2]
    assert all(gpus[1][key] is None for key in KEYS[1:]) and "GPU is lost" in gpus[1]["why"]["uuid"]
    assert gpus[2]["name"] == "Odd, Board, with commas"
    assert problems == ["garbage"]


def test_units_and_impossible_numbers() -> None:
    (gpu,) = parse_gpus("0, GPU-aa, 5 MiB, nan, -1, -5, 1e99, x")
    assert (gpu["memory_used"], gpu["memory_total"], gpu["utilization"], gpu["temperature"]) == (5, None, None, -5)
    assert gpu["power"] is None


def test_an_answer_without_gpus_is_explained() -> None:
    assert explain({"text": GOOD, "rc": 255, "why": None}) is None
    said = explain({"text": "Failed to initialize NVML: Unknown Error\n", "rc": 255, "why": None})
    assert said == "nvidia-smi ended with status 255: Failed to initialize NVML: Unknown Error"
    assert explain({"text": "", "rc": 0, "why": None}) == "nvidia-smi ended with status 0: it said nothing"
    assert explain({"text": None, "rc": None, "why": "no answer"}) == "no answer"


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    gpus, problems = parse(text)
    json.dumps(gpus)
    for gpu in gpus:
        assert set(gpu) == {*KEYS, "why"}
        for key in KEYS[1:]:
            assert (gpu[key] is None) == (key in gpu["why"])
    assert len(gpus) + len(problems) <= len(text.splitlines())


VALUE = st.one_of(st.integers(0, 10**6).map(str), st.sampled_from(["[N/A]", "[Unknown Error]"]))
NAME = st.text(st.characters(whitelist_categories=("L", "Nd"), whitelist_characters=", -"), min_size=1).map(str.strip)


@given(st.lists(st.tuples(VALUE, VALUE, VALUE, VALUE, VALUE, NAME.filter(bool)), max_size=8), st.data())
def test_one_line_spoilt_leaves_the_others(rows: list[tuple[str, ...]], data: st.DataObject) -> None:
    rows = [row for row in rows if len(f"x{row[-1]}x".splitlines()) == 1]
    lines = [f"{n}, GPU-{n}, " + ", ".join(row) for n, row in enumerate(rows)]
    whole = parse_gpus("\n".join(lines))
    assert [gpu["index"] for gpu in whole] == list(range(len(rows)))
    for gpu, row in zip(whole, rows, strict=True):
        for key, value in zip(KEYS[2:7], row, strict=False):
            assert gpu[key] == (None if value.startswith("[") else float(value))
    if lines:
        spoilt = data.draw(st.integers(0, len(lines) - 1))
        cut = data.draw(st.integers(0, len(lines[spoilt]) - 1))
        lines[spoilt] = lines[spoilt][:cut]
        others = [gpu for gpu in parse_gpus("\n".join(lines)) if gpu["index"] != spoilt]
        assert others == [gpu for gpu in whole if gpu["index"] != spoilt]


def test_the_line_of_a_sample() -> None:
    known: dict[int, str] = {}
    outcome = {"text": GOOD, "rc": 0, "why": None}
    first, second = (sample_line(5.0, outcome, known) for _ in range(2))
    assert first["devices"] == [{"index": 0, "uuid": "GPU-aa", "name": "NVIDIA H200", "memory_total": 143771}]
    one = {"index": 0, "memory_used": 70000, "utilization": 98, "temperature": 61, "power": 512.34}
    assert second == {"at": 5.0, "gpus": [one]}
    assert sample_line(6.0, {"text": None, "rc": None, "why": "no"}, known) == {"at": 6.0, "error": "no"}


# ---- asking ----------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nvidia-smi first in the path; its text is set by writing to it."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def test_the_stand_in_answers_all_fields(smi: Path, tmp_path: Path) -> None:
    spec = tmp_path / "gpus.json"
    spec.write_text(json.dumps({"gpus": [{"power.draw": "[N/A]"}, {"name": "A, B"}]}))
    smi.write_text(f'#!/bin/sh\nLAB_GPUS={spec} exec {sys.executable} -IS {LAB_SMI} "$@"\n')
    query = Query()
    query.wait()
    assert (query.rc, query.why) == (0, None)
    gpus = parse_gpus(query.text or "")
    assert gpus[0]["why"] == {"power": "N/A"} and gpus[0]["memory_total"] == 143771
    assert gpus[1]["name"] == "A, B" and gpus[1]["power"] == 76.5


def test_garbage_and_a_flood(smi: Path) -> None:
    smi.write_text("#!/bin/sh\nprintf '\\377\\000\\n'; head -c 3000000 /dev/zero; exit 3\n")
    query = Query()
    query.wait()
    assert query.rc == 3 and query.text is not None and len(query.text) <= 1 << 20
    assert explain(query.outcome()) is not None


def test_a_hang_is_left_behind(smi: Path) -> None:
    smi.write_text("#!/bin/sh\nexec sleep 100\n")
    query = Query(0.3)
    begin = time.monotonic()
    assert not query.poll()
    query.wait()
    assert time.monotonic() - begin < 1
    assert query.outcome() == {"text": None, "rc": None, "why": "nvidia-smi gave no answer in 0.3 s"}
    eventually(lambda: query.pid is None)  # this one could be killed


def test_a_sampler_does_not_pile_up_what_cannot_be_killed(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    smi.write_text(f"#!/bin/sh\necho x >> {started}\nexec sleep 100\n")
    sampler = Sampler(0.05, timeout=0.3)
    with monkeypatch.context() as m:
        m.setattr("subprocess.Popen.kill", lambda self: None)  # as in an uninterruptible state
        lines = []
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            line = sampler.step()
            if line is not None:
                lines.append(line["error"])
            time.sleep(0.01)
    assert lines[0] == "nvidia-smi gave no answer in 0.3 s"
    assert set(lines[1:]) == {"an earlier nvidia-smi still hangs"}
    assert started.read_text() == "x\n"
    (pid,) = sampler.pids()
    os.kill(pid, 9)
    eventually(lambda: sampler.pids() == [])
    smi.write_text(f"#!/bin/sh\necho '{GOOD}'\n")
    assert eventually(sampler.step)["gpus"][0]["index"] == 0
    assert processes.stat(pid) is None


def test_no_sampling_without_the_program_or_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Sampler(0).step() is None
    monkeypatch.setattr(nvidia_smi, "here", lambda: False)
    assert Sampler(1).step() is None
