"""Every known way to dense flex attention is stopped, and the compiled kernel is not.

The ways change the state of a whole process, so they run in processes of their own, together where they can.
"""

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from trainer import dense_guard
from trainer.errors import TrainerError

MODULE = importlib.import_module("torch._higher_order_ops.flex_attention")
PROGRAM = Path(__file__).parent / "dense_ways.py"


def inputs(length: int = 128, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 3, length, 16, dtype=dtype) for _ in range(3)]


@pytest.fixture(autouse=True)
def installed():
    dense_guard.install()
    yield
    dense_guard.install()


def ways(*names: str, **environment: str) -> dict[str, str]:
    """Run them in one new process -> what each ended with."""
    done = subprocess.run(
        [sys.executable, PROGRAM, *names],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_the_message_says_how_large_in_which_thread_and_from_where():
    here = Path(__file__).name
    with pytest.raises(dense_guard.DenseAttentionError) as caught:
        flex_attention(*inputs(256))
    message = str(caught.value)
    assert "query (2, 3, 256, 16), 256 keys" in message
    gib = 2 * 3 * 256 * 256 * 4 / 2**30
    assert f"{gib:.3g} GiB for one copy" in message
    assert f"{gib * 3.27:.3g} GiB in all" in message and f"with a backward pass {gib * 6.56:.3g} GiB" in message
    assert f"thread MainThread, called from {Path(__file__)}:" in message
    assert message.index(here) < message.index("pytest")  # the innermost frame comes first
    assert "torch/" not in message.split("called from")[1]


def test_another_thread_is_stopped_and_named():
    caught: list[BaseException] = []

    def call() -> None:
        try:
            flex_attention(*inputs())
        except TrainerError as error:
            caught.append(error)

    thread = threading.Thread(target=call, name="reader-7")
    thread.start()
    thread.join()
    assert isinstance(caught[0], dense_guard.DenseAttentionError)
    assert "thread reader-7" in str(caught[0])


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)])
def test_small_scores_are_allowed_inside_the_context_manager_alone(dtype, bytes_each):
    size = 2 * 3 * 128 * 128 * bytes_each
    query, key, value = inputs(dtype=dtype)
    with dense_guard.allow_dense(size):
        result = flex_attention(query, key, value)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(result, plain, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    with dense_guard.allow_dense(size - 1), pytest.raises(dense_guard.DenseAttentionError):
        flex_attention(query, key, value)
    with pytest.raises(dense_guard.DenseAttentionError):
        flex_attention(query, key, value)


def test_the_bound_falls_back_when_the_context_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), dense_guard.allow_dense(1 << 40):
        raise ZeroDivisionError
    with pytest.raises(dense_guard.DenseAttentionError):
        flex_attention(*inputs())


def test_installing_twice_changes_nothing():
    placed, original = MODULE._math_attention_inner, dense_guard._original
    dense_guard.install()
    assert MODULE._math_attention_inner is placed and dense_guard._original is original is not placed


def test_check_notices_that_the_guard_was_taken_out(monkeypatch):
    dense_guard.check()
    monkeypatch.setattr(MODULE, "_math_attention_inner", dense_guard._original)
    with pytest.raises(TrainerError, match=f"torch {torch.__version__.replace('+', '.')}.*not any more"):
        dense_guard.check()


@pytest.mark.parametrize("name", ["_math_attention_inner", "sdpa_dense", "sdpa_dense_backward"])
def test_a_torch_without_these_names_is_refused(monkeypatch, name):
    monkeypatch.delattr(MODULE, name)
    with pytest.raises(TrainerError, match=f"with torch {torch.__version__.replace('+', '.')}.*has no {name}"):
        dense_guard.install()


def test_a_torch_in_which_the_name_is_not_called_is_refused(monkeypatch):
    """As if the dense path had moved to another function, and the old one were left over."""
    monkeypatch.setattr(MODULE, "_math_attention_inner", dense_guard._original)
    monkeypatch.setattr(MODULE, "math_attention", lambda *_: None)
    with pytest.raises(TrainerError, match="sdpa_dense"):
        dense_guard.install()


def test_a_torch_whose_dense_path_lives_elsewhere_is_refused(monkeypatch):
    moved = type(dense_guard.check)(MODULE.sdpa_dense.__code__, dict(MODULE.__dict__), "sdpa_dense")
    monkeypatch.setattr(MODULE, "sdpa_dense", moved)
    with pytest.raises(TrainerError, match="sdpa_dense looks names up elsewhere"):
        dense_guard.check()


STOPPED = "DenseAttentionError"
WITHOUT_A_COMPILATION = (
    *("plain", "force_eager", "eager_then_compile", "aot_eager", "eager", "disabled_helper", "debug_switch"),
    *("config_disable", "suppressed", "plain_if_compiling", "flop_counter", "nested_trace"),
)
STOPPED_BY_TORCH = {"flop_counter": "TypeError"}  # refuses any mode that it does not know


@pytest.mark.parametrize(
    ("compile", "by_torch"),
    [("--fullgraph", STOPPED_BY_TORCH | {"suppressed": "BackendCompilerFailed"}), ("--loose", STOPPED_BY_TORCH)],
)
def test_ways_without_a_compilation_are_stopped(compile, by_torch):
    assert ways(compile, *WITHOUT_A_COMPILATION) == dict.fromkeys(WITHOUT_A_COMPILATION, STOPPED) | by_torch


def test_a_compiler_that_is_switched_off_from_outside_is_stopped():
    assert ways("compiled", TORCH_COMPILE_DISABLE="1") == {"compiled": STOPPED}


def test_the_compiled_kernel_runs_and_is_stopped_where_torch_gives_up_compiling():
    expected = {"compiled": "ran", "eager_on_recompile": STOPPED, "recompile_limit": STOPPED}
    assert ways("--loose", *expected) == expected
