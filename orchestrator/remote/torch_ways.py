"""The ways from flex attention to its dense implementation, each tried for real on the CPU with small tensors.

Used by torch_inside. What Dynamo captures is given to a backend that compiles nothing and answers with empty tensors:
whether a call is *compiled* is decided before any backend, and so no compiler is needed at the place.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any, Callable, Dict, List, Sequence

SHORT, LONG = 128, 256
module: Callable[[str], Any] = importlib.import_module
Flex = Callable[..., Any]


class Dense(Exception):
    """A guard in the place of torch's dense implementation."""


class Trial:
    """One cell of the table: `fullgraph`, and whether a guard stands before the dense implementation."""

    def __init__(self, fullgraph: bool, guarded: bool) -> None:
        self.torch = module("torch")
        self.dynamo = module("torch._dynamo")
        self.config = module("torch._dynamo.config")
        self.flex = module("torch.nn.attention.flex_attention")
        self.fx = module("torch.fx._symbolic_trace")
        self.fullgraph = fullgraph
        self.dense = False
        self._watch(guarded)

    def _watch(self, guarded: bool) -> None:
        operator = module("torch._higher_order_ops.flex_attention")
        original = operator._math_attention_inner

        def inner(*args: Any, **options: Any) -> Any:
            self.dense = True
            if guarded:
                raise Dense("the guard stopped it")
            return original(*args, **options)

        operator._math_attention_inner = inner

    def compile(self, function: Flex, fullgraph: Any = None, backend: Any = None) -> Flex:
        whole = self.fullgraph if fullgraph is None else fullgraph
        compiled: Flex = self.torch.compile(function, fullgraph=whole, dynamic=False, backend=backend or self.empty)
        return compiled

    def compiled(self) -> Flex:
        return self.compile(self.flex.flex_attention)

    def call(self, function: Flex, length: int = SHORT) -> Any:
        with self.torch.no_grad():
            q, k, v = (self.torch.ones(1, 1, length, 16) for _ in range(3))
            mask = self.flex.create_block_mask(_causal, None, None, length, length, device="cpu", BLOCK_SIZE=128)
            return function(q, k, v, block_mask=mask)

    def empty(self, graph: Any, _: Any) -> Flex:
        """A backend: tensors of the right shapes."""
        output = next(node for node in graph.graph.nodes if node.op == "output")
        values = [node.meta["example_value"] for node in output.args[0]]
        shapes = [(tuple(int(size) for size in value.shape), value.dtype) for value in values]
        return lambda *_: [self.torch.zeros(shape, dtype=kind) for shape, kind in shapes]


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


# --- the ways -------------------------------------------------------------------------------------


def plain(t: Trial) -> None:
    t.call(t.flex.flex_attention)


def debug_flag(t: Trial) -> None:
    t.flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    t.call(t.flex.flex_attention)


def nested_trace(t: Trial) -> None:
    """A compiled call while the flag of FX tracing is on, with the error switched off."""
    t.config.error_on_nested_fx_trace = False
    function = t.compiled()
    if hasattr(t.fx, "_is_fx_tracing_flag"):
        t.fx._is_fx_tracing_flag = True
    else:
        t.fx._set_is_fx_tracing(True)
    t.call(function)


def force_eager(t: Trial) -> None:
    function = t.compiled()
    with t.torch.compiler.set_stance("force_eager"):
        t.call(function)


def eager_on_recompile(t: Trial) -> None:
    function = t.compiled()
    t.call(function)
    with t.torch.compiler.set_stance("eager_on_recompile"):
        t.call(function, LONG)


def eager_then_compile(t: Trial) -> None:
    function = t.compiled()
    with t.torch.compiler.set_stance("eager_then_compile"):
        t.call(function)


def environment_disable(t: Trial) -> None:
    t.call(t.compiled())


def config_disable(t: Trial) -> None:
    t.config.disable = True
    t.call(t.compiled())


def backend_eager(t: Trial) -> None:
    t.call(t.compile(t.flex.flex_attention, backend="eager"))


def backend_aot_eager(t: Trial) -> None:
    t.call(t.compile(t.flex.flex_attention, backend="aot_eager"))


def disabled_helper(t: Trial) -> None:
    def helper(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return t.flex.flex_attention(q, k, v, block_mask=mask)

    helper = t.torch.compiler.disable(helper)

    def region(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
        return helper(q * 1, k, v, block_mask)

    t.call(t.compile(region, fullgraph=False))


def recompile_limit(t: Trial) -> None:
    t.config.recompile_limit = 1
    function = t.compiled()
    for length in (SHORT, LONG, 3 * SHORT):
        t.call(function, length)


def suppressed_failure(t: Trial) -> None:
    t.config.suppress_errors = True

    def broken(graph: Any, _: Any) -> Any:
        raise RuntimeError("a backend that fails")

    t.call(t.compile(t.flex.flex_attention, backend=broken))


def plain_if_compiling(t: Trial) -> None:
    """A helper that leaves compiling to an outer torch.compile, while another thread compiles something."""
    function = t.compiled()
    t.call(function)
    inside, go_on = threading.Event(), threading.Event()

    def slow(graph: Any, _: Any) -> Any:
        inside.set()
        go_on.wait(20)
        return graph.forward

    compiling = t.torch.compile(lambda x: x + 1, backend=slow)
    thread = threading.Thread(target=lambda: compiling(t.torch.ones(2)), daemon=True)
    thread.start()
    try:
        if not inside.wait(20):
            raise RuntimeError("the other thread did not begin to compile")
        chosen = t.flex.flex_attention if t.torch.compiler.is_compiling() else function
    finally:
        go_on.set()  # before the call, which may have to compile in turn
        thread.join(20)
    t.call(chosen)


def dispatch_mode(t: Trial) -> None:
    modes = module("torch.utils._python_dispatch")

    def through(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    function = t.compiled()
    t.call(function)
    with type("Mode", (modes.TorchDispatchMode,), {"__torch_dispatch__": through})():
        t.call(function)


def compiled_call(t: Trial) -> None:
    t.call(t.compiled())


def disabled_caller(t: Trial) -> None:
    function = t.compiled()
    t.torch.compiler.disable(lambda: t.call(function))()


def autocast(t: Trial) -> None:
    function = t.compiled()
    with t.torch.autocast("cpu", dtype=t.torch.bfloat16):
        t.call(function)


def graph_break(t: Trial) -> None:
    def region(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
        print("", end="")
        return t.flex.flex_attention(q, k, v, block_mask=block_mask)

    t.call(t.compile(region, fullgraph=False))


WAYS: Dict[str, Callable[[Trial], None]] = {
    "plain-call": plain,
    "nested-trace-silenced": nested_trace,
    "stance-force-eager": force_eager,
    "stance-eager-on-recompile": eager_on_recompile,
    "stance-eager-then-compile": eager_then_compile,
    "TORCH_COMPILE_DISABLE": environment_disable,
    "config-disable": config_disable,
    "backend-eager": backend_eager,
    "backend-aot-eager": backend_aot_eager,
    "plain-in-disabled-helper": disabled_helper,
    "recompile-limit": recompile_limit,
    "suppress-errors": suppressed_failure,
    "flex-debug-flag": debug_flag,
    "plain-if-compiling": plain_if_compiling,
    "dispatch-mode": dispatch_mode,
    "compiled-call": compiled_call,
    "compiled-from-disabled": disabled_caller,
    "compiled-autocast": autocast,
    "compiled-after-break": graph_break,
}
CELLS = ("loose", "fullgraph", "loose+guard", "fullgraph+guard")
AT_START = ("TORCH_COMPILE_DISABLE",)  # by a variable that is read when torch is imported


def cells(ways: Sequence[str] = ()) -> List[str]:
    """Every cell as "WAY CELL": of these ways, or of all but those that take a variable at the start."""
    return ["%s %s" % (way, cell) for way in ways or (way for way in WAYS if way not in AT_START) for cell in CELLS]


def outcome(name: str) -> Dict[str, Any]:
    """`{"dense": bool, "raised": text or null}` of the cell "WAY CELL"."""
    way, cell = name.split(" ")
    trial = Trial(cell.startswith("fullgraph"), cell.endswith("guard"))
    raised = None
    try:
        WAYS[way](trial)
    except Exception as error:
        raised = "%s: %s" % (type(error).__name__, (str(error).strip().splitlines() or [""])[0][:200])
    return {"dense": trial.dense, "raised": raised, "process": os.getpid()}
