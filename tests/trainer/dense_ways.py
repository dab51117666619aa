"""Ways that lead flex attention to building its scores: `dense_ways.py [--loose] [--cuda] NAME …` tells how each ended.

Run in a process of its own by test_dense_guard.py and test_dense_gpu.py, because they change settings of the whole
process. The order matters: nothing may follow `nested_trace`. `--loose` compiles with `fullgraph=False`. With `--cuda`
forward and backward run on a GPU, at a size at which dense attention would take gigabytes, and the peak is printed too.
"""

import sys
import threading
import warnings
from collections.abc import Callable

import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import trainer.attention  # noqa: F401  installs the guard, as importing it does in the trainer

CUDA = "--cuda" in sys.argv
FULLGRAPH = "--loose" not in sys.argv
SHORT, LONG = (4096, 8192) if CUDA else (128, 256)
Attend = Callable[..., torch.Tensor]


def call(function: Attend, length: int = LONG) -> None:
    if not CUDA:  # where flex attention has no backward pass
        with torch.no_grad():
            function(*(torch.randn(1, 2, length, 16) for _ in range(3)))
        return
    where = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    function(*(torch.randn(1, 8, length, 128, **where) for _ in range(3))).sum().backward()
    torch.cuda.synchronize()


def compiled(**options: object) -> Attend:
    return torch.compile(flex.flex_attention, **({"fullgraph": FULLGRAPH, "dynamic": False} | options))


def failing_backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> None:
    raise RuntimeError("this backend fails")


def under_stance(stance: str) -> None:
    with torch.compiler.set_stance(stance):
        call(compiled())


def eager_on_recompile() -> None:
    function = compiled()
    call(function, SHORT)
    with torch.compiler.set_stance("eager_on_recompile"):
        call(function, LONG)


def disabled_helper() -> None:
    """A compiled step calls a helper that is kept out of compilation."""
    helper = torch.compiler.disable(lambda *tensors: flex.flex_attention(*tensors))

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return helper(query * 1, key, value)

    call(torch.compile(step, backend="eager", dynamic=False))


def debug_switch() -> None:
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        call(flex.flex_attention)
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


def config_disable() -> None:
    with torch._dynamo.config.patch(disable=True):
        call(compiled())


def suppressed() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        call(compiled(backend=failing_backend))


def nested_trace() -> None:
    """As if another thread were tracing, where that is not an error. The flag stays on."""
    torch._dynamo.config.error_on_nested_fx_trace = False
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):
        symbolic_trace._is_fx_tracing_flag = True
    else:
        symbolic_trace._set_is_fx_tracing(True)
    call(compiled())


def recompile_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        function = compiled()
        call(function, SHORT)
        call(function, LONG)


def plain_if_compiling() -> None:
    """A helper of the kind that calls flex attention plainly where a compilation goes on, which since 2.13 may be
    another thread's."""
    inside, done = threading.Event(), threading.Event()

    def slow_backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> object:
        inside.set()
        done.wait(60)
        return graph.forward

    other = threading.Thread(target=lambda: torch.compile(lambda x: x * 2, backend=slow_backend)(torch.ones(3)))
    other.start()
    inside.wait(60)
    try:
        busy = torch.compiler.is_compiling()
    finally:
        done.set()
        other.join()
    call(flex.flex_attention if busy else compiled())


def flop_counter() -> None:
    with FlopCounterMode(display=False):
        call(flex.flex_attention)


def checkpointed() -> None:
    function = compiled()
    call(lambda *tensors: checkpoint(function, *tensors, use_reentrant=False))


def autocast() -> None:
    with torch.autocast("cuda" if CUDA else "cpu", dtype=torch.bfloat16):
        call(compiled())


def inside_a_disabled_caller() -> None:
    function = compiled()
    call(torch.compiler.disable(lambda *tensors: function(*tensors)))


def outer_graph_break() -> None:
    function = compiled()

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = query * 1
        torch._dynamo.graph_break()
        return function(query, key, value)

    call(torch.compile(step, dynamic=False))


DENSE: dict[str, Callable[[], None]] = {
    "plain": lambda: call(flex.flex_attention),
    "force_eager": lambda: under_stance("force_eager"),
    "eager_then_compile": lambda: under_stance("eager_then_compile"),
    "eager_on_recompile": eager_on_recompile,
    "aot_eager": lambda: call(compiled(backend="aot_eager")),
    "eager": lambda: call(compiled(backend="eager")),
    "disabled_helper": disabled_helper,
    "debug_switch": debug_switch,
    "config_disable": config_disable,
    "suppressed": suppressed,
    "plain_if_compiling": plain_if_compiling,
    "recompile_limit": recompile_limit,
    "flop_counter": flop_counter,
    "nested_trace": nested_trace,
}
COMPILED: dict[str, Callable[[], None]] = {
    "compiled": lambda: call(compiled()),
    "checkpointed": checkpointed,
    "autocast": autocast,
    "inside_a_disabled_caller": inside_a_disabled_caller,
    "outer_graph_break": outer_graph_break,
}

warnings.filterwarnings("ignore")
for name in (word for word in sys.argv[1:] if not word.startswith("--")):
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        (DENSE | COMPILED)[name]()
        end = "ran"
    except Exception as error:
        end = type(error).__name__
        print(name, error, file=sys.stderr)
    peak = f" {torch.cuda.max_memory_allocated() - before}" if CUDA else ""
    print(f"{name} {end}{peak}", flush=True)
