"""Ways that lead flex attention to building its scores: `dense_ways.py NAME …` prints how each ended.

Run in a process of its own by test_dense_guard.py, because they change settings of the whole process. The order
matters: `recompile_limit` wants one compilation before it, by `compiled`, and nothing may follow `nested_trace`.
"""

import sys
import warnings
from collections.abc import Callable

import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace
from torch.nn.attention import flex_attention as flex

import trainer.attention  # noqa: F401  installs the guard, as importing it does in the trainer


def call(function: Callable[..., torch.Tensor], length: int = 128) -> None:
    with torch.no_grad():
        function(*(torch.randn(1, 2, length, 16) for _ in range(3)))


def compiled(**options: object) -> Callable[..., torch.Tensor]:
    return torch.compile(flex.flex_attention, **({"fullgraph": True, "dynamic": False} | options))


def failing_backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> None:
    raise RuntimeError("this backend fails")


def force_eager() -> None:
    with torch.compiler.set_stance("force_eager"):
        call(compiled())


def disabled_helper() -> None:
    """A compiled step calls a helper that is kept out of compilation."""

    @torch.compiler.disable
    def helper(*tensors: torch.Tensor) -> torch.Tensor:
        return flex.flex_attention(*tensors)

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
        call(compiled(fullgraph=False, backend=failing_backend))


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
        call(compiled(fullgraph=False), 256)


WAYS: dict[str, Callable[[], None]] = {
    "plain": lambda: call(flex.flex_attention),
    "compiled": lambda: call(compiled()),
    "force_eager": force_eager,
    "aot_eager": lambda: call(compiled(backend="aot_eager")),
    "eager": lambda: call(compiled(backend="eager")),
    "disabled_helper": disabled_helper,
    "debug_switch": debug_switch,
    "config_disable": config_disable,
    "suppressed": suppressed,
    "nested_trace": nested_trace,
    "recompile_limit": recompile_limit,
}

warnings.filterwarnings("ignore")
for name in sys.argv[1:]:
    try:
        WAYS[name]()
        print(name, "ran", flush=True)
    except Exception as error:
        print(name, type(error).__name__, flush=True)
        print(name, error, file=sys.stderr)
