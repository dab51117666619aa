"""What the guard changes in torch: three private places, found by name, changed, and proved by a trace.

1. `Tracer.trace` takes Dynamo's own compile lock, so that no two traces, and no trace and compilation, overlap. The
   same lock and not another one, since a trace can lead to a compilation and a compilation traces: two locks could be
   taken in either order.
2. The flag "somebody is tracing" holds for the thread that traces. torch 2.14 has it so; before, the flag is a global
   of the process. `torch.compile` keeps the function that reads it, hence that function's code is exchanged and not
   the function. The one other writer of the flag, the uncompiled path of higher-order operators, is made to write
   elsewhere.
3. A trace's patches of `nn.Module` hold for the thread that traces; the modules of others run as ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

TESTED = ((2, 11), (2, 14))  # oldest and newest
_NAME = "_compile_guard"  # of what is put into torch's modules


WAIT = 1800.0  # seconds: the longest that a thread waits for others that compile or trace


class CompileGuardError(RuntimeError):
    """The guard does not let the program go on: one sentence says what, where, and what to do."""


class BindError(Exception):
    """This torch lacks what the guard rests on, or does not do what it is made to do. One sentence."""


@dataclass(frozen=True)
class Torch:
    """The modules of torch at hand, each with every name that the guard needs."""

    fx: types.ModuleType  # torch.fx._symbolic_trace
    operators: types.ModuleType  # torch._higher_order_ops.utils
    convert: types.ModuleType  # torch._dynamo.convert_frame
    frame: types.ModuleType  # torch._dynamo.eval_frame
    flex: types.ModuleType  # torch.nn.attention.flex_attention

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        return self.convert.compile_lock

    @property
    def shared_flag(self) -> bool:
        """Whether the tracing flag is the process's and not the thread's."""
        return hasattr(self.fx, "_is_fx_tracing_flag")

    def flag(self) -> bool:
        """The tracing flag as this thread sees it."""
        return bool(self.fx._is_fx_tracing_flag if self.shared_flag else self.fx._get_is_fx_tracing())


_MODULES = {
    "fx": "torch.fx._symbolic_trace",
    "operators": "torch._higher_order_ops.utils",
    "convert": "torch._dynamo.convert_frame",
    "frame": "torch._dynamo.eval_frame",
    "flex": "torch.nn.attention.flex_attention",
}
_NEEDED = {
    "fx": (
        "Tracer.trace",
        "_Patcher.patch_method",
        "CURRENT_PATCHER",
        "_orig_module_call",
        "_orig_module_getattr",
        "is_fx_symbolic_tracing.__code__",
    ),
    "operators": (),
    "convert": ("compile_lock.acquire",),
    "frame": ("_stance.stance", "TorchPatcher.patch"),
    "flex": ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",),
}
_SHARED_FLAG = {"operators": ("_set_compilation_env.__wrapped__.__code__",)}  # where the flag is the process's
_OWN_FLAG = {"fx": ("_get_is_fx_tracing", "_set_is_fx_tracing")}  # and where it is the thread's
_SETTINGS = ("error_on_nested_fx_trace", "suppress_errors", "disable")  # of torch._dynamo.config


def find() -> Torch:
    """torch's modules. BindError naming torch's version and every name that is missing."""
    found: dict[str, Any] = {}
    missing = []
    for key, name in _MODULES.items():
        try:
            found[key] = importlib.import_module(name)
        except ImportError:
            missing.append(name)
    shared = hasattr(found.get("fx"), "_is_fx_tracing_flag")
    for needed in (_NEEDED, _SHARED_FLAG if shared else _OWN_FLAG):
        for key, paths in needed.items():
            missing += [f"{_MODULES[key]}.{path}" for path in paths if key in found and not _has(found[key], path)]
    config = importlib.import_module("torch._dynamo.config")
    missing += [f"torch._dynamo.config.{name}" for name in _SETTINGS if not hasattr(config, name)]
    if missing:
        raise BindError(f"torch {torch.__version__} has no {', no '.join(missing)}")
    return Torch(**found)


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def tested() -> bool:
    """Whether this version of torch is one that the guard was tested with."""
    return TESTED[0] <= tuple(int(part) for part in torch.__version__.split(".")[:2]) <= TESTED[1]


@contextlib.contextmanager
def held(lock: threading.RLock) -> Iterator[None]:  # type: ignore[valid-type]
    """The compile lock, for which nobody waits for ever. CompileGuardError after WAIT seconds."""
    if not lock.acquire(timeout=WAIT):
        raise CompileGuardError(
            f"a trace or a compilation in another thread has not ended for {WAIT:g} s: look at the stacks of all "
            f"threads (py-spy dump), since two that wait for each other never end"
        )
    try:
        yield
    finally:
        lock.release()


class Patches:
    """The changes, which can be undone."""

    def __init__(self, found: Torch) -> None:
        self._torch = found
        self._local = threading.local()  # .depth: how many traces of this thread are under way
        self._undo = contextlib.ExitStack()
        self._mine: list[tuple[Any, str, Any]] = []

    def apply(self) -> None:
        """Change torch. BindError, with all undone, where the change does not hold."""
        fx = self._torch.fx
        with held(self._torch.lock):
            try:
                self._torch.frame.TorchPatcher.patch()  # wraps Tracer.trace too, once, at the first compilation
                self._replace(fx.Tracer, "trace", torch.compiler.disable(self._locked(fx.Tracer.trace)))
                self._replace(fx._Patcher, "patch_method", _for_this_thread(fx._Patcher.patch_method))
                if self._torch.shared_flag:
                    self._own_flag()
                self._prove()
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        with held(self._torch.lock):
            self._undo.close()
            self._mine.clear()

    def lost(self) -> list[str]:
        """What of it somebody has changed since, a sentence each."""
        return [
            f"{owner.__name__}.{name} is no longer the guard's"
            for owner, name, value in self._mine
            if getattr(owner, name, None) is not value
        ]

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
        self._mine.append((owner, name, value))

    def _locked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        lock, local = self._torch.lock, self._local

        @functools.wraps(original)
        def trace(tracer: Any, *args: Any, **options: Any) -> Any:
            with held(lock):
                local.depth = getattr(local, "depth", 0) + 1
                try:
                    return original(tracer, *args, **options)
                finally:
                    local.depth -= 1

        return trace

    def _own_flag(self) -> None:
        fx, operators, local = self._torch.fx, self._torch.operators, self._local
        reader, writer = fx.is_fx_symbolic_tracing, operators._set_compilation_env.__wrapped__
        if reader.__code__.co_freevars or writer.__code__.co_freevars:
            raise BindError(f"torch {torch.__version__} wraps is_fx_symbolic_tracing or _set_compilation_env")
        elsewhere = contextlib.contextmanager(_with_decoy_flag(writer))

        @contextlib.contextmanager
        def environment() -> Iterator[None]:
            depth, local.depth = getattr(local, "depth", 0), 0
            try:
                with elsewhere():
                    yield
            finally:
                local.depth = depth

        for module, value in ((fx, local), (operators, environment)):
            setattr(module, _NAME, value)
            self._undo.callback(delattr, module, _NAME)
        for function, code in ((reader, _reads.__code__), (writer, _writes.__code__)):
            self._undo.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
            self._mine.append((function, "__code__", code))

    def _prove(self) -> None:
        """Trace, and look from inside: this thread sees it, another does not, and neither is anything left behind."""
        fx = self._torch.fx
        module, seen = torch.nn.Identity(), {}

        def other() -> None:
            seen["other"] = fx.is_fx_symbolic_tracing()
            try:
                seen["module"] = module(1)
            except Exception as error:  # what a patched nn.Module says
                seen["module"] = error

        def traced(x: Any) -> Any:
            seen["own"] = fx.is_fx_symbolic_tracing() or torch.compiler.is_compiling()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return x

        fx.Tracer().trace(traced)
        wrong = []
        if not seen["own"]:
            wrong.append("a trace is not seen by its own thread")
        if seen["other"]:
            wrong.append("a trace is seen by other threads")
        if seen["module"] != 1:
            wrong.append("a trace changes the modules that other threads call")
        wrong += poison(self._torch)
        if wrong:
            raise BindError(f"with torch {torch.__version__} {', and '.join(wrong)}")


def poison(found: Torch) -> list[str]:
    """What a trace that is over has left behind, a sentence each. Means something only while nothing is traced."""
    fx = found.fx
    left = []
    if found.flag():
        left.append(
            "the flag of FX tracing is on with nothing being traced: compiled calls will fail or run uncompiled"
        )
    if fx.CURRENT_PATCHER is not None:
        left.append("the patcher of an ended trace is still in place")
    for name, original in (("__call__", fx._orig_module_call), ("__getattr__", fx._orig_module_getattr)):
        if getattr(torch.nn.Module, name) is not original:
            left.append(f"nn.Module.{name} is still that of an ended trace: plain modules will fail")
    return left


def traps(found: Torch) -> list[str]:
    """Settings, as this thread sees them, under which nothing can be made safe, a sentence each."""
    config = importlib.import_module("torch._dynamo.config")
    bad = []
    if not config.error_on_nested_fx_trace:
        bad.append(
            "torch._dynamo.config.error_on_nested_fx_trace is False: a compiled call that meets a trace runs "
            "uncompiled, without a word; leave it True"
        )
    if config.suppress_errors:
        bad.append(
            "torch._dynamo.config.suppress_errors is True (TORCHDYNAMO_SUPPRESS_ERRORS): what fails to compile runs "
            "uncompiled, without a word; leave it False"
        )
    if config.disable:
        bad.append(
            "torch._dynamo.config.disable is True (TORCH_COMPILE_DISABLE): nothing is compiled, so nothing can be "
            "warmed; leave it False"
        )
    if found.flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG:
        bad.append(
            "flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is True: plain flex attention builds its scores"
        )
    return bad


def stance(found: Torch) -> str:
    return str(found.frame._stance.stance)


def _reads() -> bool:
    """The new code of `is_fx_symbolic_tracing`; its globals are that function's."""
    return getattr(_compile_guard, "depth", 0) > 0 and not torch.compiler.is_compiling()  # noqa: F821


def _writes() -> Iterator[None]:
    """The new code of `_set_compilation_env`; its globals are that function's."""
    with _compile_guard():  # noqa: F821
        yield


def _with_decoy_flag(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which reads and writes a tracing flag that nobody else does."""
    flag = types.SimpleNamespace(_is_fx_tracing_flag=False)
    decoy = _Instead(torch, fx=_Instead(torch.fx, _symbolic_trace=flag))
    return types.FunctionType(function.__code__, {**function.__globals__, "torch": decoy}, function.__name__)


class _Instead:
    """An object's attributes, some of them others."""

    def __init__(self, original: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _for_this_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_Patcher.patch_method`, whose patches of nn.Module hold for the thread that makes them."""

    @functools.wraps(original)
    def patch_method(patcher: Any, cls: type, name: str, new: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if cls is torch.nn.Module:
            new = _in_thread(threading.get_ident(), new, getattr(cls, name))
        return original(patcher, cls, name, new, *args, **options)

    return patch_method


def _in_thread(owner: int, new: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def method(*args: Any, **options: Any) -> Any:
        return (new if threading.get_ident() == owner else before)(*args, **options)

    return method
