"""The guard for threads that compile: each piece with real threads, and what happens without it."""

import contextlib
import importlib
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.fx._symbolic_trace as fx
from torch._dynamo import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex

from trainer import compile_guard, dense_guard
from trainer.compile_guard import CompileGuardError, PoisonedError, private
from trainer.compile_guard import guard as guard_module

ROOT = Path(__file__).parents[2]
SHARED = hasattr(fx, "_is_fx_tracing_flag")  # the flag is the process's
PATIENCE = 60  # seconds: what is waited for follows at once


def heal():
    """What this torch takes for clean, whatever a test left."""
    if SHARED:
        fx._is_fx_tracing_flag = False
    fx.CURRENT_PATCHER = None
    torch.nn.Module.__call__ = fx._orig_module_call
    torch.nn.Module.__getattr__ = fx._orig_module_getattr


@pytest.fixture(autouse=True)
def clean():
    yield
    compile_guard.remove()
    torch.compiler.set_stance("default")
    heal()
    torch._dynamo.reset()


@pytest.fixture
def guard():
    return compile_guard.install(dense=False)


class Paused:
    """A trace in a thread of its own that stops in its middle until it is let go on."""

    def __init__(self, name="tracer"):
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    def _run(self):
        def traced(x):
            self.inside.set()
            assert self.go_on.wait(PATIENCE)
            return x

        try:
            fx.Tracer().trace(traced)
        except Exception as error:
            self.error = error

    def end(self):
        self.go_on.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def __enter__(self):
        assert self.inside.wait(PATIENCE)
        return self

    def __exit__(self, *_):
        self.end()


def overlap():
    """Two traces of which the first to begin is the first to end."""
    first = Paused("first").__enter__()
    with Paused("second"):
        first.end()
    return first


def compiled():
    """A function compiled for vectors of 3, with a function of its own behind it."""
    namespace = {}
    exec("def f(x):\n    return x.sin() + 1", namespace)
    function = torch.compile(namespace["f"], backend="eager", dynamic=False)
    function(torch.ones(3))
    return function


def together(*functions):
    """What each of them came to, in a thread each: its result or its exception."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception(PATIENCE) or future.result() for future in futures]


# --- without it, and the poison ---------------------------------------------------------------------


def test_overlapping_traces_poison_the_process_and_install_refuses():
    overlap()
    found = private.poison(private.find())
    assert found
    assert any("FX tracing" in one for one in found) == SHARED
    with pytest.raises(PoisonedError, match="Install the guard at the start"):
        compile_guard.install(dense=False)


@pytest.mark.skipif(not SHARED, reason="this torch has the flag per thread")
def test_without_it_a_trace_stops_compiled_calls_of_others():
    function = compiled()
    with Paused(), pytest.raises(RuntimeError, match="symbolically trace"):
        function(torch.ones(3))


def test_without_it_a_trace_stops_plain_modules_of_others():
    with Paused(), pytest.raises(NameError, match="not installed as a submodule"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))


@pytest.mark.parametrize("what", ["flag", "patcher", "call", "getattr", "trace", "stance"])
def test_check_names_what_is_poisoned(guard, what):
    guard.check()
    said = what
    if what == "flag":
        if not SHARED:
            fx._set_is_fx_tracing(True)
        else:
            fx._is_fx_tracing_flag = True
        said = "the flag of FX tracing is on"
    elif what == "patcher":
        fx.CURRENT_PATCHER, said = object(), "patcher of an ended trace"
    elif what == "call":
        torch.nn.Module.__call__, said = (lambda *_: None), r"nn\.Module\.__call__"
    elif what == "getattr":
        torch.nn.Module.__getattr__, said = (lambda *_: None), r"nn\.Module\.__getattr__"
    elif what == "trace":
        fx.Tracer.trace, said = (lambda *_: None), r"Tracer\.trace is no longer the guard's"
    else:
        with guard.thread("cpu"):
            guard.seal(threads=1)
        torch.compiler.set_stance("default")
        said = 'set the stance of torch.compile to "default"'
    try:
        with pytest.raises(PoisonedError, match=said) as caught:
            guard.check()
        assert "last checkpoint" in str(caught.value)
    finally:
        if not SHARED:
            fx._set_is_fx_tracing(False)


def test_check_waits_for_a_trace_under_way_and_finds_nothing(guard):
    with Paused() as trace:
        assert private.poison(private.find())  # by itself that would look like poison
        release = threading.Timer(0.3, trace.go_on.set)
        release.start()
        guard.check()
        assert trace.go_on.is_set()


def test_no_wait_for_a_trace_is_for_ever(guard, monkeypatch):
    monkeypatch.setattr(private, "WAIT", 0.2)
    with Paused():
        for work in (guard.check, lambda: torch.fx.symbolic_trace(torch.nn.ReLU())):
            with pytest.raises(CompileGuardError, match=r"has not ended for 0\.2 s"):
                work()
        with pytest.raises(CompileGuardError, match="no thread starts to train"), guard.thread("cpu"):
            guard.seal(threads=1)
    guard.check()


# --- what it changes in torch -----------------------------------------------------------------------


def test_traces_of_two_threads_do_not_overlap(guard):
    with Paused("first") as first:
        second = Paused("second")
        assert not second.inside.wait(0.3)
        first.end()
        assert second.inside.wait(PATIENCE)
        second.end()
    assert first.error is None and second.error is None
    guard.check()


def test_a_trace_and_a_compilation_do_not_overlap(guard):
    function = torch.compile(lambda x: x + 1, backend="eager")
    done = threading.Event()

    def compile_one():
        function(torch.ones(2))
        done.set()

    with Paused():
        thread = threading.Thread(target=compile_one)
        thread.start()
        assert not done.wait(0.3)
    assert done.wait(PATIENCE)
    thread.join()


def test_a_compiled_call_and_a_plain_module_run_while_another_thread_traces(guard):
    function = compiled()
    with Paused():
        assert torch.equal(function(torch.ones(3)), torch.ones(3).sin() + 1)
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)


def test_functions_compiled_before_it_are_guarded_too():
    function = compiled()
    compile_guard.install(dense=False)
    with Paused():
        function(torch.ones(3))


def test_a_trace_still_meets_its_own_compiled_call(guard):
    """What torch refuses within one thread it still refuses."""
    function = compiled()
    with pytest.raises(RuntimeError, match="symbolically trace"):
        torch.fx.symbolic_trace(lambda x: function(x))
    guard.check()


def test_traces_are_as_they_were(guard):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    code = torch.fx.symbolic_trace(net).code
    graph = make_fx(lambda x: x.sin() * 2)(torch.ones(2))
    compile_guard.remove()
    assert torch.fx.symbolic_trace(net).code == code
    assert make_fx(lambda x: x.sin() * 2)(torch.ones(2)).code == graph.code


def meet(environment):
    """An uncompiled operator whose work begins while another thread traces, and ends after it."""
    allow = config.allow_empty_graphs
    with Paused() as trace:
        with environment():
            assert config.allow_empty_graphs is True
            trace.end()
        assert config.allow_empty_graphs is allow


def test_an_uncompiled_operator_cannot_leave_the_flag_on():
    """Uncompiled flex attention, among others, writes back what it read of the flag."""
    environment = importlib.import_module("torch._higher_order_ops.utils")._set_compilation_env
    meet(environment)
    assert bool(private.poison(private.find())) == SHARED
    heal()
    guard = compile_guard.install(dense=False)
    meet(environment)
    guard.check()
    one = torch.ones(1, 1, 2, 2)
    with warnings.catch_warnings(), dense_guard.allow_dense(1000):
        warnings.simplefilter("ignore")
        assert flex.flex_attention(one, one, one).shape == one.shape
    guard.check()


def test_many_threads_that_trace_compile_and_call(guard):
    function, stop = compiled(), threading.Event()
    net = torch.nn.Linear(3, 3)
    count = dict.fromkeys(("trace", "compile", "call"), 0)

    def keep(name, work):
        while not stop.is_set():
            work()
            count[name] += 1

    def trace():
        make_fx(lambda x: x * 2)(torch.ones(2))
        torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))

    timer = threading.Timer(2.0, stop.set)
    timer.start()
    results = together(
        lambda: keep("trace", trace),
        lambda: keep("trace", trace),
        lambda: keep("compile", compiled),
        lambda: keep("call", lambda: net(function(torch.ones(3)))),
    )
    assert results == [None] * 4 and all(count.values())
    guard.check()


def test_remove_leaves_torch_as_it_was():
    found = private.find()
    found.frame.TorchPatcher.patch()
    names = [(fx.Tracer, "trace"), (fx._Patcher, "patch_method"), (fx.is_fx_symbolic_tracing, "__code__")]
    before = [getattr(owner, name) for owner, name in names]
    compile_guard.install(dense=False)
    assert all(getattr(o, n) is not b for (o, n), b in list(zip(names, before, strict=True))[: 3 if SHARED else 2])
    compile_guard.remove()
    assert all(getattr(o, n) is b for (o, n), b in zip(names, before, strict=True))
    assert not hasattr(fx, "_compile_guard") and not hasattr(found.operators, "_compile_guard")


def test_a_flag_per_thread_is_left_alone(monkeypatch):
    """As in torch 2.14, here by its names: only the reader's answer is needed, and no code is exchanged."""
    local = threading.local()
    if SHARED:
        monkeypatch.delattr(fx, "_is_fx_tracing_flag")
        monkeypatch.setattr(fx, "_get_is_fx_tracing", lambda: getattr(local, "flag", False), raising=False)
        monkeypatch.setattr(fx, "_set_is_fx_tracing", lambda value: setattr(local, "flag", value), raising=False)
    found = private.find()
    assert not found.shared_flag and not found.flag()
    assert "the thread's already" in guard_module.Guard(found, private.Patches(found)).describe()


def test_a_missing_name_is_told_with_the_version(monkeypatch):
    monkeypatch.delattr(fx, "_orig_module_call")
    monkeypatch.delattr(fx._Patcher, "patch_method")
    with pytest.raises(CompileGuardError) as caught:
        compile_guard.install(dense=False)
    said = str(caught.value)
    assert f"torch {torch.__version__} has no" in said and "2.11 to 2.14" in said
    assert "_orig_module_call" in said and "_Patcher.patch_method" in said


def test_a_change_that_does_not_hold_is_undone_and_told(monkeypatch):
    monkeypatch.setattr(private, "_for_this_thread", lambda original: original)
    private.find().frame.TorchPatcher.patch()
    before = fx.Tracer.trace
    with pytest.raises(CompileGuardError, match="changes the modules that other threads call"):
        compile_guard.install(dense=False)
    assert fx.Tracer.trace is before


# --- the order of a trainer -------------------------------------------------------------------------


def test_warm_is_one_at_a_time_then_the_seal_then_recompiling_fails(guard):
    function, gate = compiled(), threading.Barrier(3)

    def step(size):
        return function(torch.ones(size))

    def worker(size):
        gate.wait(PATIENCE)
        with guard.thread("cpu"):
            warmed = guard.warm(step, size)
            guard.seal(threads=3)
            assert guard.sealed
            assert torch.equal(step(size), warmed)
            guard.check()
            with pytest.raises(RuntimeError, match="recompile"):
                function(torch.ones(size + 10))
            with pytest.raises(CompileGuardError, match="warm every shape before"):
                guard.warm(step, size)
        return size

    assert together(*(lambda size=size: worker(size) for size in (4, 5, 6))) == [4, 5, 6]
    with pytest.raises(RuntimeError, match="recompile"):
        torch.compile(lambda x: x - 1, backend="eager")(torch.ones(2))


def test_warm_up_never_overlaps(guard):
    now, most = [0], [0]

    def step():
        now[0] += 1
        most[0] = max(most[0], now[0])
        threading.Event().wait(0.05)
        now[0] -= 1

    def worker():
        with guard.thread("cpu"):
            for _ in range(3):
                guard.warm(step)

    assert together(worker, worker, worker) == [None] * 3
    assert most == [1]


def test_a_thread_that_dies_releases_the_rest_with_its_reason(guard):
    waiting = threading.Event()

    def patient():
        with guard.thread("cpu"):
            waiting.set()
            guard.seal(threads=2)

    def dying():
        with guard.thread("cpu"):
            assert waiting.wait(PATIENCE)
            guard.warm(lambda: int("one"))

    waited, died = together(patient, dying)
    assert isinstance(died, ValueError)
    assert isinstance(waited, CompileGuardError)
    assert "no thread starts to train" in str(waited) and "ValueError: invalid literal" in str(waited)
    with pytest.raises(CompileGuardError, match="no thread starts"), guard.thread("cpu"):
        pass


def test_the_seal_waits_so_long_and_names_who_is_missing(guard):
    leave = threading.Event()

    def late():
        with guard.thread("cpu"):
            guard.warm(lambda: None)
            assert leave.wait(PATIENCE)

    def early():
        with guard.thread("cpu"):
            try:
                guard.seal(threads=2, wait=0.3)
            finally:
                leave.set()

    _, said = together(late, early)
    assert isinstance(said, CompileGuardError) and not guard.sealed
    assert "only 1 of 2 threads" in str(said) and "(cpu) has compiled" in str(said)


def test_threads_that_count_differently_are_told(guard):
    def worker(number):
        with guard.thread("cpu"):
            guard.seal(threads=number, wait=PATIENCE)

    for said in together(lambda: worker(2), lambda: worker(3)):
        assert isinstance(said, CompileGuardError) and "threads, others for" in str(said)


def test_warm_and_seal_are_for_registered_threads(guard):
    for call in (lambda: guard.warm(print), lambda: guard.seal(threads=1)):
        with pytest.raises(CompileGuardError, match="is not registered"):
            call()
    with guard.thread("cpu"), pytest.raises(CompileGuardError, match="registered already"), guard.thread("cpu"):
        pass


def test_the_warm_up_is_looked_through_for_poison_before_the_seal(guard):
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(PoisonedError, match="the warm-up left the process poisoned"))
        stack.enter_context(guard.thread("cpu"))
        guard.warm(setattr, fx, "CURRENT_PATCHER", object())
        guard.seal(threads=1)


# --- what it refuses --------------------------------------------------------------------------------


def test_two_training_threads_on_one_gpu_before_the_seal(guard):
    with guard.thread("cuda:0"):
        same, other = together(lambda: register("cuda:0"), lambda: register("cuda:1"))
    assert isinstance(same, CompileGuardError) and other is None
    assert "would both train on cuda:0 before the seal" in str(same) and "autograd thread" in str(same)
    assert register("cuda:0") is None  # that thread has gone


def register(device):
    with compile_guard.install(dense=False).thread(device):
        return None


def test_two_threads_on_one_gpu_after_the_seal(guard):
    with guard.thread("cuda:0"):
        guard.seal(threads=1)
        assert together(lambda: register("cuda:0")) == [None]


@pytest.mark.parametrize(
    ("name", "value"), [("error_on_nested_fx_trace", False), ("suppress_errors", True), ("disable", True)]
)
def test_settings_that_hide_failures(name, value):
    with config.patch(name, value), pytest.raises(CompileGuardError, match=f"{name} is {value}"):
        compile_guard.install(dense=False)
    guard = compile_guard.install(dense=False)

    def worker():  # since torch 2.12 a thread has settings of its own
        with config.patch(name, value), guard.thread("cpu"):
            pass

    (said,) = together(worker)
    assert isinstance(said, CompileGuardError) and f"{name} is {value}" in str(said)


def test_a_setting_that_is_changed_later_is_met_at_the_next_warm_up(guard):
    refused = pytest.raises(CompileGuardError, match="suppress_errors")
    with refused, guard.thread("cpu"), config.patch("suppress_errors", True):
        guard.warm(lambda: None)


def test_flex_attentions_debug_flag_and_a_stance(monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with pytest.raises(CompileGuardError, match="_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
        compile_guard.install(dense=False)
    monkeypatch.undo()
    with torch.compiler.set_stance("force_eager"), pytest.raises(CompileGuardError, match='"force_eager"'):
        compile_guard.install(dense=False)


# --- by itself --------------------------------------------------------------------------------------


def test_it_needs_nothing_else_of_the_trainer():
    text = (
        "import sys; from trainer import compile_guard; "
        "print(sorted(name for name in sys.modules if name.startswith('trainer')))"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    package = "trainer.compile_guard"
    assert done.stdout.strip() == str(["trainer", package, f"{package}.guard", f"{package}.private"])


def test_install_once_and_the_dense_guard_with_it():
    first = compile_guard.install()
    assert compile_guard.install() is first
    with pytest.raises(dense_guard.DenseAttentionError):
        flex.flex_attention(*[torch.ones(1, 1, 2, 2)] * 3)
    first.check()
