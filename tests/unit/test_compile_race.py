"""What benchmarks.compile_race makes of a try: its outcome, and the stacks of one that hangs."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from benchmarks.compile_race import Cell, Row, hanging, outcome, table

FX = "call: RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function."
AUTOGRAD = """\
Thread 0x00007f01 (most recent call first):
  File "torch/_inductor/compile_fx.py", line 2418 in compile_fx_backward
  File "torch/_dynamo/backends/common.py", line 79 in _wrapped_bw_compiler
"""
HOLDER = """\
Thread 0x00007f02 (most recent call first):
  File "torch/autograd/graph.py", line 865 in _engine_run_backward
  File "torch/autograd/__init__.py", line 514 in grad
  File "torch/_higher_order_ops/flex_attention.py", line 700 in create_fw_bw_graph
  File "torch/_dynamo/convert_frame.py", line 1300 in _convert_frame_assert
"""
WAITER = """\
Thread 0x00007f03 (most recent call first):
  File "torch/_dynamo/convert_frame.py", line 2314 in __call__
"""
TRAINING = """\
Thread 0x00007f04 (most recent call first):
  File "torch/autograd/graph.py", line 865 in _engine_run_backward
  File "torch/_tensor.py", line 630 in backward
"""


def found(*errors: str, dense: int = 0, left: list[str] | None = None) -> dict[str, Any]:
    return {"errors": dict.fromkeys(errors, 1), "dense": dense, "left": left or []}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (found(), "ok"),
        (found(FX), "FX error"),
        (found("module: NameError: module is not installed as a submodule"), "module"),
        (found(FX, left=["the flag is on"]), "poisoned"),
        (found("noise: AssertionError: CURRENT_PATCHER is None in finally block"), "poisoned"),
        (found("check: PoisonedError: the flag"), "poisoned"),
        (found(FX, dense=1, left=["the flag is on"]), "dense"),
        (found("call: DenseAttentionError: flex attention was about"), "dense"),
        (found("call: FailOnRecompileLimitHit: 8"), "other"),
    ],
)
def test_a_try_counts_under_the_worst_that_it_met(what, name):
    assert outcome(what) == name


@pytest.mark.parametrize(
    ("threads", "name"),
    [
        ((AUTOGRAD, HOLDER, WAITER), "deadlock"),
        ((HOLDER, WAITER), "hang"),
        ((AUTOGRAD, TRAINING), "hang"),  # it compiles its backward pass, and nobody keeps it from that
        ((WAITER, TRAINING), "hang"),
        ((), "hang"),
    ],
)
def test_a_deadlock_is_known_by_the_pair(threads, name):
    assert hanging("Timeout (0:01:30)!\n" + "\n".join(threads)) == name


def test_the_table_has_the_outcomes_asked_for_and_those_that_came():
    rows = {
        Cell("one", "cold", False): Row(collections.Counter(deadlock=2, ok=1), 40, 3),
        Cell("one", "cold", True): Row(collections.Counter(ok=3), 60, 0),
    }
    head, bare, guarded = table(rows)
    columns = ("workers", "scenario", "ok", "FX error", "poisoned", "deadlock", "dense", "other", "failed / calls")
    assert head.split() == " ".join(columns).split()
    assert bare.split() == ["one", "cold", "-", "1", ".", ".", "2", ".", ".", "3", "/", "40"]
    assert guarded.split()[:4] == ["one", "cold", "guard", "3"]
    rows[Cell("one", "cold", True)].outcomes["hang"] += 1
    assert "hang" in table(rows)[0]
