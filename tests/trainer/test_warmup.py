"""One compiles first and the others wait for it, within bounds; after the seal nothing is compiled any more."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer import kinds, warming, warmup
from trainer.compile_report import Report
from trainer.errors import TrainerError

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["trainer.warmup"])


def rank(folder: Path, number: int, deed: str, timeout: float) -> None:
    """Warms up, and writes how that went to `folder`/NUMBER.json."""
    log = folder / "log"

    def work() -> None:
        with log.open("a") as file:
            file.write(f"{number} begins\n")
        if deed == "fails":
            raise ValueError("no such kernel\nand so on")
        if deed == "hangs":
            time.sleep(LIMIT)
        time.sleep(0.5)
        with log.open("a") as file:
            file.write(f"{number} ends\n")

    said: list[str] = []
    warmup.SAID_EVERY = 0.2
    try:
        warmed = warmup.warm(
            work, folder=folder / "warm", name="x", who=f"rank {number}", timeout=timeout, say=said.append
        )
        result = {"compiled_here": warmed.compiled_here, "said": said}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "said": said}
    (folder / f"{number}.json").write_text(json.dumps(result))


def start(folder: Path, number: int, deed: str = "compiles", timeout: float = LIMIT):
    process = _processes.Process(target=rank, args=(folder, number, deed, timeout))
    process.start()
    return process


def until(condition) -> None:
    ends = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def results(folder: Path, *processes) -> list[dict]:
    for process in processes:
        process.join(LIMIT)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(1, len(processes) + 1)]


def test_one_compiles_and_the_others_load_what_it_made(tmp_path):
    found = results(tmp_path, *(start(tmp_path, number) for number in (1, 2, 3)))
    assert sorted(each["compiled_here"] for each in found) == [False, False, True]
    first = next(number for number, each in enumerate(found, 1) if each["compiled_here"])
    assert (tmp_path / "log").read_text().splitlines()[:2] == [f"{first} begins", f"{first} ends"]


def first_begins(tmp_path: Path, deed: str):
    process = start(tmp_path, 0, deed)
    until(lambda: (tmp_path / "log").exists())
    return process


def test_the_others_are_told_why_the_first_failed(tmp_path):
    first_begins(tmp_path, "fails").join(LIMIT)
    (other,) = results(tmp_path, start(tmp_path, 1))
    assert other["error"].startswith("TrainerError: rank 0 compiled for all and did not get through")
    assert other["error"].endswith("ValueError: no such kernel")


def test_a_first_that_is_killed_releases_the_others_with_the_reason(tmp_path):
    process = first_begins(tmp_path, "hangs")
    other = start(tmp_path, 1)
    time.sleep(0.3)
    assert other.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    (found,) = results(tmp_path, other)
    assert "rank 0 compiled for all and did not get through: it died while it compiled" in found["error"]
    assert (tmp_path / "log").read_text() == "0 begins\n"  # nobody compiled what has just failed


def test_nobody_waits_for_ever_nor_in_silence(tmp_path):
    process = first_begins(tmp_path, "hangs")
    try:
        (found,) = results(tmp_path, start(tmp_path, 1, timeout=1.0))
    finally:
        process.kill()
    assert "rank 0 has been compiling for 1 s" in found["error"]
    assert found["said"][0].startswith("waiting for rank 0, which compiles for all")


def test_attempts_of_one_run_know_nothing_of_each_other(tmp_path, monkeypatch):
    """Ranks of one launcher share a folder; what is left of an attempt that failed is in another."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    ours = warming._folder(tmp_path)  # of the launcher of these tests
    words = [sys.executable, "-c", f"import os; from pathlib import Path; from trainer import warming; "
             f"print(warming._folder(Path({str(tmp_path)!r})), os.getppid())"]  # fmt: skip
    folder, parent = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert int(parent) == os.getpid() and Path(folder).name.startswith(f"{parent}-")
    assert Path(folder) != ours
    assert warming._folder(tmp_path) == ours
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert warming._folder(tmp_path) == Path(folder)  # a run of one process is its own launcher


def test_a_kernel_too_large_for_the_gpu_is_explained():
    def work():
        raise RuntimeError("out of resource: shared memory, Required: 114944, Hardware limit: 101376.")

    with pytest.raises(TrainerError, match=r"does not fit this GPU's shared memory.*Required: 114944"):
        warmup._run(work, Report())


def test_every_kind_of_gpu_is_warmed_on_one_card_of_it_and_a_failure_stops_no_other(tmp_path, monkeypatch, capfd):
    names = ["H200", "RTX PRO 6000", "H200", "L4"]
    assert kinds.cards_of(names) == {"H200": 0, "RTX PRO 6000": 1, "L4": 3}
    assert kinds.cards_of([]) == {}
    log = tmp_path / "log"
    program = (
        "import os, sys; seen = os.environ['CUDA_VISIBLE_DEVICES']; "
        f"open({str(log)!r}, 'a').write(seen + ' ' + ' '.join(sys.argv[1:]) + chr(10)); "
        "sys.exit(3 if seen == '5' else 0)"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,3,GPU-12ab")
    assert kinds.warm_each(names, [sys.executable, "-c", program, "warmup", "a b.yaml"]) == 1
    assert log.read_text().splitlines() == ["7 warmup a b.yaml", "5 warmup a b.yaml", "GPU-12ab warmup a b.yaml"]
    assert "warming up failed on RTX PRO 6000 (exit code 3)" in capfd.readouterr().err
    log.unlink()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # all cards of the machine
    assert kinds.warm_each(["A", "B"], [sys.executable, "-c", program]) == 0
    assert log.read_text().splitlines() == ["0 ", "1 "]


SEALED = """
import torch
from tests.trainer.test_head import H, batch
from trainer.head import Objective, head_pass
from trainer import compile_report, warmup

objective = Objective(cross_entropy=0.5, kl=0.5, tv=0.0, temperature=1.0, weights="decay", alpha=0.5)

def both(**options):
    made = batch(dtype=torch.float32, **options)
    results = []
    for compiled in (False, True):
        made["hidden"].grad = None
        result = head_pass(**made, objective=objective, compiled=compiled)
        result.total.backward()
        results += [result.total.detach(), made["hidden"].grad]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])

report = compile_report.Report(say=print)
with report.watch():
    both(entries=20, chunk=8)
warmup.seal()
both(entries=60, chunk=8)  # more chunks of the same shape
print("the same shapes run", flush=True)
try:
    both(entries=20, chunk=16)
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
made = batch(entries=20, chunk=8, pad=False)
try:
    head_pass(**made, objective=objective, compiled=True)
except ValueError as error:
    print("unpadded:", error)
"""


def test_after_the_seal_another_shape_is_an_error(tmp_path):
    """Of the head pass, compiled on the CPU, which gives what it gives otherwise."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SEALED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "head pass reductions: miss" in ran.stdout and "head pass gradient: miss" in ran.stdout
    assert "the same shapes run" in ran.stdout, ran.stdout + ran.stderr
    assert "refused: " in ran.stdout and "ecompil" in ran.stdout, ran.stdout + ran.stderr
    assert "unpadded: " in ran.stdout
