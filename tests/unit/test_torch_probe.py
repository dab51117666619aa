"""`orch probe`: what is asked in an environment, how the answer is judged, and how it is shown."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator import probe
from orchestrator.errors import NotFound, UsageError
from orchestrator.place.session import Reply
from orchestrator.remote import torch_inside, torch_probe, torch_ways
from orchestrator.remote.frames import OpError
from orchestrator.view.probe import print_report
from tests.unit.remote_runs import Call

FX = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function."
LINE = {"file": "torch/a.py", "line": 7, "text": "with compile_lock:"}


def answer(**facts: Any) -> dict[str, Any]:
    """What a place answers about torch 2.11, `facts` changed."""
    found: dict[str, Any] = {
        "settings": {"error_on_nested_fx_trace": True, "suppress_errors": False, "disable": False, "stance": "default"},
        "flag_shared": True,
        "compiling_shared": False,
        "call_during_trace": FX,
        "call_during_compile": FX,
        "module_during_trace": "NameError: module is not installed as a submodule",
        "left_by_overlap": {"call": FX, "flag": True, "patcher": False, "module": True, "errors": []},
        "config_per_thread": False,
        "guard_binds": True,
    }
    found.update(facts)
    lines = dict.fromkeys(("check", "raise", "force", "flag", "reader", "forward_lock", "backward_lock"), LINE)
    return {
        "python": "/envs/x/bin/python",
        "run": None,
        "why": None,
        "variables": [],
        "torch": {
            "version": "2.11.0+cu128",
            "cuda": "12.8",
            "hip": None,
            "triton": {"value": "3.6.0"},
            "python": "3.12.3",
            "path": "/envs/x/lib/python3.12/site-packages/torch",
        },
        "source": {"value": lines},
        "facts": {k: v if isinstance(v, dict) and "why" in v else {"value": v} for k, v in found.items()},
        "ways": [
            way("plain-call loose", dense=True),
            way("plain-call fullgraph", dense=True),
            way("plain-call loose+guard", dense=True, raised="Dense: the guard stopped it"),
            way("plain-call fullgraph+guard", dense=True, raised="Dense: the guard stopped it"),
            way("recompile-limit fullgraph", raised="FailOnRecompileLimitHit: Hard failure"),
            way("compiled-call loose"),
        ],
    }


def way(cell: str, dense: bool = False, raised: str | None = None) -> dict[str, Any]:
    return {"cell": cell, "value": {"dense": dense, "raised": raised, "process": 1}}


def judged(found: dict[str, Any] | None = None, **facts: Any) -> probe.Report:
    return probe.judge("pve/200", {"id": "0" * 16, "name": "exp", "polluted": None}, found or answer(**facts))


def failure(report: probe.Report, name: str) -> probe.Failure:
    return next(one for one in report.failures if one.name == name)


# --- judging ----------------------------------------------------------------------------------------


def test_torch_2_11_can_have_all_four():
    report = judged()
    assert [one.possible for one in report.failures] == [True] * 4
    assert failure(report, "deadlock").how == "derived"
    assert "traces or compiles" in failure(report, "fx-error").text and "for good" in failure(report, "fx-error").text
    assert all(one.text and one.advice for one in report.failures)
    assert report.good and not report.unknown
    assert report.condition["flag"] == "process" and report.condition["checked"] == "torch/a.py:7"


def test_torch_2_14_has_the_flag_per_thread():
    left = {"call": None, "flag": False, "patcher": False, "module": True, "errors": []}
    report = judged(flag_shared=False, call_during_trace=None, call_during_compile=None, left_by_overlap=left)
    assert failure(report, "fx-error").possible is False
    assert failure(report, "patched-module").possible is True
    assert report.condition["flag"] == "thread"


def test_what_could_not_be_read_stays_unknown_with_its_reason():
    why = {"why": "the process that tried it ended with signal 11"}
    report = judged(call_during_trace=why, module_during_trace=why, flag_shared=why)
    for name in ("fx-error", "patched-module"):
        one = failure(report, name)
        assert one.possible is None and one.how == "unknown" and "signal 11" in one.text
    assert report.condition["flag"] is None
    assert len(report.unknown) == 3 and all("signal 11" in line for line in report.unknown)
    assert report.good


def test_ways_by_their_outcome():
    ways = {one.name: one for one in judged().ways}
    assert ways["plain-call"].cells == {
        "loose": "dense",
        "fullgraph": "dense",
        "loose+guard": "stopped",
        "fullgraph+guard": "stopped",
    }
    assert ways["recompile-limit"].cells == {"fullgraph": "error"}
    assert ways["compiled-call"].cells == {"loose": "compiled"}
    assert not ways["compiled-backward"].cells and "no backward pass on the CPU" in ways["compiled-backward"].why
    told = {one["name"]: one["tried"] for one in judged().to_json()["ways"]}
    assert told["plain-call"] and not told["compiled-backward"]


def test_a_guard_that_does_not_stop_a_way_is_told():
    found = answer()
    found["ways"].append(way("other loose+guard", dense=True))
    assert "does not stop other" in failure(judged(found), "silent-dense").advice


def test_no_way_is_silent_where_all_raise():
    found = answer()
    found["ways"] = [way("plain-call loose", dense=True, raised="RuntimeError: found no compiled frames")]
    one = failure(judged(found), "silent-dense")
    assert one.possible is False and one.how == "tried"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("error_on_nested_fx_trace", False),
        ("suppress_errors", True),
        ("disable", True),
        ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        ("stance", "force_eager"),
        ("debug_backend_override", "eager"),
    ],
)
def test_settings_that_have_to_be_changed(name, value):
    good = {"error_on_nested_fx_trace": True, "suppress_errors": False, "disable": False, "stance": "default"}
    report = judged(settings={**good, name: value})
    assert not report.good
    assert [one.name for one in report.settings if one.bad] == [name]
    assert "CHANGE IT" in shown(report)


@pytest.mark.parametrize(
    ("name", "value", "bad"),
    [
        ("TORCH_COMPILE_DISABLE", "1", True),
        ("TORCH_COMPILE_DISABLE", "0", False),
        ("TORCHDYNAMO_DISABLE", "1", True),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", True),  # any value counts
        ("TORCHINDUCTOR_VEC_ISA_OK", "1", True),
        ("TORCH_LOGS", "recompiles", False),
        ("PYTHONWARNINGS", "ignore", False),
    ],
)
def test_variables(name, value, bad):
    found = answer()
    found["variables"] = [{"name": name, "value": value, "from": "run x"}]
    report = judged(found)
    assert report.good is not bad
    assert f"{name} = {value}  (from run x)" in shown(report)


def test_no_torch_is_told_and_not_judged():
    report = judged({"python": "/p", "variables": [], "why": None, "torch": {"why": "ModuleNotFoundError: No module"}})
    assert not report.good and not report.failures and not report.ways
    assert "torch cannot be imported there (ModuleNotFoundError: No module)" in shown(report)
    assert report.to_json()["torch"] is None


def test_an_absent_triton_is_none_and_an_unreadable_one_too():
    found = answer()
    found["torch"]["triton"] = {"why": "PackageNotFoundError: No package metadata was found for triton"}
    assert judged(found).torch["triton"] is None
    assert "triton none" in shown(judged(found))


# --- showing ----------------------------------------------------------------------------------------


def shown(report: probe.Report) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=200, highlight=False, markup=False), report)
    return out.getvalue()


def test_it_fits_80_columns():
    found = answer()
    found["ways"] = [
        way(f"{name} {cell}", dense=True, raised="IndexError: tuple index" if "guard" not in cell else "Dense: stop")
        for name in torch_ways.WAYS
        for cell in torch_ways.CELLS
    ]
    text = shown(judged(found))
    assert max(map(len, text.splitlines())) <= 80
    assert "FX error on any call       yes (tried)" in text
    assert "plain-call                 dense, then error dense, then error stopped" in text


# --- choosing ---------------------------------------------------------------------------------------


class Session:
    """A place with these environments."""

    def __init__(self, environments: list[dict[str, Any]]) -> None:
        self.environments = environments
        self.asked: list[dict[str, Any]] = []
        self.place = type("Place", (), {"name": "pve/200"})()

    def call(self, op: str, args: dict[str, Any], **_: Any) -> Reply:
        if op == "env_list":
            return Reply({"environments": self.environments})
        self.asked.append(args)
        return Reply(answer())


def environment(ident: str, name: str, *, torch: bool = True, used: float | None = None, entry: str = "") -> dict:
    manifest = {"name": name, "torch": {"version": "2.11"} if torch else None, "built": 1.0}
    return {"entry": entry or ident, "id": ident, "manifest": manifest, "last_used": used, "polluted": None}


A, B, C = "a" * 16, "b" * 16, "c" * 16


def test_the_environment_used_last_that_has_torch():
    session = Session(
        [
            environment(A, "old", used=1.0),
            environment(B, "new", used=2.0),
            environment(C, "tools", torch=False, used=3.0),
            environment("d" * 16, "aside", used=9.0, entry="d" * 16 + ".polluted-1"),
        ]
    )
    assert probe.choose(session, None)["id"] == B
    assert probe.choose(session, "old")["id"] == A
    assert probe.choose(session, "cc")["id"] == C
    with pytest.raises(NotFound, match="no environment aside at pve/200"):
        probe.choose(session, "aside")
    with pytest.raises(NotFound, match="no environment at pve/200 yet"):
        probe.choose(Session([]), None)
    report = probe.read(session, env=None, python=None, progress=lambda *_: None)
    assert session.asked == [{"id": B, "python": None, "seconds": probe.SECONDS}]
    assert report.environment == {"id": B, "name": "new", "polluted": None}


def test_an_environment_and_a_python_exclude_each_other():
    with pytest.raises(UsageError, match="exclude"):
        probe.read(Session([]), env="a", python="/p", progress=lambda *_: None)
    with pytest.raises(UsageError, match="whole path"):
        probe.read(Session([]), env=None, python="python3", progress=lambda *_: None)


def test_text_from_the_place_cannot_steer_the_terminal():
    session = Session([environment(A, "x")])
    session.call = lambda op, args, **_: Reply(  # type: ignore[method-assign]
        {"environments": session.environments} if op == "env_list" else {"python": "/p", "why": "\x1b[2J gone"}
    )
    report = probe.read(session, env=None, python=None, progress=lambda *_: None)
    assert "\x1b" not in report.error and "gone" in report.error


# --- the operation, with stand-ins for Python ---------------------------------------------------------


def stub(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def ask(root: Path, python: str | None = None, **more: Any) -> dict[str, Any]:
    found = torch_probe.torch_probe({"id": None, "python": python, "seconds": 20, **more}, Call(str(root), {}))
    return json.loads(json.dumps(found))


def test_a_python_without_torch(tmp_path):
    python = stub(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    found = ask(tmp_path, python)
    assert found["why"] is None and "ModuleNotFoundError" in found["torch"]["why"]


def test_a_python_that_dies_or_hangs_is_told(tmp_path):
    found = ask(tmp_path, stub(tmp_path / "dies", "echo no such thing >&2; exit 3"))
    assert found["why"].endswith("dies ended with exit 3: no such thing")
    assert "signal 9" in ask(tmp_path, stub(tmp_path / "killed", "kill -9 $$"))["why"]
    assert "the time was up" in ask(tmp_path, stub(tmp_path / "hangs", "exec sleep 60"), seconds=0.3)["why"]


def test_no_such_python(tmp_path):
    for wanted, code in (("/nowhere/python", "not_found"), ("python", "usage")):
        with pytest.raises(OpError) as caught:
            ask(tmp_path, wanted)
        assert caught.value.code == code


def test_the_newest_runs_variables_are_told_and_given(tmp_path):
    folder = tmp_path / "envs" / A / "bin"
    folder.mkdir(parents=True)
    stub(folder / "python", f'env >{tmp_path}/seen; exec {sys.executable} -S "$@"')
    run = tmp_path / "runs" / "demo-20260101-000000-aaaa"
    run.mkdir(parents=True)
    (run / "state.json").write_text(json.dumps({"environment": A, "created": 5.0, "phase": "finished"}))
    variables = {"TORCH_COMPILE_DISABLE": "1", "OTHER": "2"}
    (run / "launch.json").write_text(json.dumps({"argv": ["/x/python"], "env": variables}))
    os.environ["TORCH_FROM_THE_SERVER"] = "1"
    try:
        found = ask(tmp_path, id=A)
    finally:
        del os.environ["TORCH_FROM_THE_SERVER"]
    told = {one["name"]: (one["value"], one["from"]) for one in found["variables"]}
    assert told == {"TORCH_COMPILE_DISABLE": ("1", f"run {run.name}")} and found["run"] == run.name
    seen = (tmp_path / "seen").read_text()
    assert "TORCH_COMPILE_DISABLE=1" in seen and "OTHER=2" in seen
    assert "TORCH_FROM_THE_SERVER" not in seen and "ORCH_RUN_ID" not in seen


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    ask(tmp_path, stub(tmp_path / "python", f'exec {sys.executable} -S "$@"'))
    assert list((tmp_path / "t").iterdir()) == []


# --- inside: questions in forks -----------------------------------------------------------------------


def test_one_question_that_crashes_or_raises_costs_its_own_answer(monkeypatch):
    monkeypatch.setattr(torch_inside, "_hide_gpus", lambda: None)
    monkeypatch.setattr(torch_inside, "PATIENCE", 1.0)
    told: list[tuple[int, int]] = []
    questions = [
        ("good", lambda: {"a": "b" * 100_000}),
        ("raises", lambda: 1 / 0),
        ("dies", lambda: os.kill(os.getpid(), 9)),
        ("leaves", lambda: os._exit(3)),
        ("hangs", lambda: __import__("time").sleep(60)),
    ]
    found = dict(torch_inside.apart(questions, lambda *at: told.append(at)))
    assert found["good"] == {"value": {"a": "b" * 100_000}}
    assert "ZeroDivisionError" in found["raises"]["why"]
    assert "signal 9" in found["dies"]["why"] and "exit 3" in found["leaves"]["why"]
    assert "no answer within" in found["hangs"]["why"]
    assert told[-1] == (5, 5)


def test_every_way_has_every_cell():
    cells = torch_ways.cells()
    assert len(cells) == len(set(cells)) == (len(torch_ways.WAYS) - len(torch_ways.AT_START)) * 4
    assert set(torch_ways.AT_START) == set(torch_probe._AT_START)
    assert torch_ways.cells(["x"]) == [f"x {cell}" for cell in torch_ways.CELLS]
