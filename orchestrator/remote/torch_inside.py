"""Runs in an environment's Python, as a script: what its torch is, and what can go wrong with it when it compiles.

    python torch_inside.py ANSWER           everything, as JSON into the file ANSWER
    python torch_inside.py ANSWER WAY...    these ways to dense attention only

torch is imported once, and each question is answered in a fork of that moment, so that none colours another and one
that crashes or hangs costs its own answer only. Nothing touches a GPU. Each reading is {"value": …} or {"why": …}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

PATIENCE = 60.0  # seconds that one question may take
_STEP = 20.0  # seconds that one thread waits for another in a question

module: Callable[[str], Any] = importlib.import_module
Reading = Dict[str, Any]
Question = Callable[[], Any]


def main(argv: List[str]) -> int:
    answer: Dict[str, Any] = {}
    ways = module("torch_ways")
    try:
        torch = module("torch")
    except BaseException as error:  # also SystemExit, and whatever a broken installation raises
        write(argv[0], {"torch": {"why": sentence(error)}})
        return 0
    answer["torch"] = versions(torch)
    try:
        for name in ("torch._dynamo", "torch.fx", "torch.nn.attention.flex_attention"):
            module(name)
    except BaseException as error:
        answer["compile"] = {"why": sentence(error)}
        write(argv[0], answer)
        return 0
    answer["source"] = reading(lambda: source(torch))
    _import_all(dict(apart([("modules", modules_of_a_compilation)], lambda *_: None))["modules"])
    questions: List[Tuple[str, Question]] = [] if argv[1:] else list(QUESTIONS.items())
    cells = [(cell, _bind(ways.outcome, cell)) for cell in ways.cells(argv[1:])]
    asked = dict(apart([*questions, *cells], lambda done, total: tell(argv[0], done, total)))
    answer["facts"] = {name: asked[name] for name, _ in questions}
    answer["ways"] = [dict(asked[cell], cell=cell) for cell, _ in cells]
    write(argv[0], answer)
    return 0


def modules_of_a_compilation() -> List[str]:
    before = set(sys.modules)
    module("torch_ways").outcome("compiled-call loose")
    return sorted(set(sys.modules) - before)


def _import_all(modules: Reading) -> None:
    """So that not each fork has to; it compiles nothing, and what cannot be imported here each fork meets itself."""
    for name in modules.get("value", ()):
        with contextlib.suppress(Exception):
            module(name)


def _bind(function: Callable[..., Any], *args: Any) -> Question:
    return lambda: function(*args)


def write(path: str, answer: Any) -> None:
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(temporary, path)


def tell(path: str, done: int, total: int) -> None:
    """How far it is, for whoever waits."""
    write(path + ".progress", [done, total])


def sentence(error: BaseException) -> str:
    return "%s: %s" % (type(error).__name__, (str(error).strip().splitlines() or [""])[0][:300])


def reading(read: Question) -> Reading:
    try:
        return {"value": read()}
    except BaseException as error:
        return {"why": sentence(error)}


# --- questions, each in a process of its own ----------------------------------------------------


def apart(questions: List[Tuple[Any, Question]], progress: Callable[[int, int], None]) -> Iterator[Tuple[Any, Reading]]:
    """Each question's key and reading; a few at once."""
    at_once = max(1, min(4, len(os.sched_getaffinity(0))))
    waiting, running, done = list(questions), {}, 0  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < at_once:
            key, question = waiting.pop(0)
            pid, fd = _fork(question)
            running[fd] = (key, pid, time.monotonic() + PATIENCE, [])
        ready, _, _ = select.select(list(running), [], [], 0.5)
        for fd in list(running):
            key, pid, end, parts = running[fd]
            data = os.read(fd, 1 << 16) if fd in ready else None
            if data:
                parts.append(data)
                continue
            if data is None and time.monotonic() < end:
                continue
            del running[fd]
            done += 1
            progress(done, len(questions))
            yield key, _collect(pid, fd, b"".join(parts), late=data is None)


def _fork(question: Question) -> Tuple[int, int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:  # the child: it never returns from here
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        _hide_gpus()
        os.write(write_end, json.dumps(reading(question)).encode("utf-8"))
    finally:
        os._exit(0)


def _collect(pid: int, fd: int, text: bytes, late: bool) -> Reading:
    if late:
        os.kill(pid, signal.SIGKILL)
    os.close(fd)
    _, status = os.waitpid(pid, 0)
    if late:
        return {"why": "no answer within %.0f s" % PATIENCE}
    try:
        return dict(json.loads(text.decode("utf-8")))
    except ValueError:
        ended = "signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "exit %d" % os.WEXITSTATUS(status)
        return {"why": "the process that tried it ended with %s" % ended}


def _hide_gpus() -> None:
    """Keep this process off the GPUs, which others may be using. A CUDA build that sees none crashes in one function
    that needs a device; on the CPU it has nothing to do."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch = sys.modules.get("torch") or module("torch")
    if torch.version.cuda and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        torch._C._ensureCUDADeviceGuardSet = lambda: None


# --- what there is --------------------------------------------------------------------------------


def versions(torch: Any) -> Dict[str, Any]:
    import platform

    def triton() -> str:
        return str(module("importlib.metadata").version("triton"))

    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "triton": reading(triton),
        "python": platform.python_version(),
        "path": os.path.dirname(str(torch.__file__)),
    }


def source(torch: Any) -> Dict[str, Any]:
    """Where the condition stands in the source: file, line and text, null where there is no such line."""
    root = os.path.dirname(torch.__file__)

    def find(name: str, pattern: str, after: str = "") -> Any:
        started = not after
        with open(os.path.join(root, name), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                started = started or after in line
                if started and re.search(pattern, line):
                    return {"file": "torch/" + name, "line": number, "text": line.strip()}
        return None

    frame, tracing = "_dynamo/eval_frame.py", "fx/_symbolic_trace.py"
    return {
        "check": find(frame, r"^\s+is_fx_symbolic_tracing\(\)", after="def compile_wrapper"),
        "raise": find(frame, r"if config\.error_on_nested_fx_trace", after="def compile_wrapper"),
        "force": find(frame, r"force_compile_during_fx_trace", after="def compile_wrapper"),
        "flag": find(tracing, r"^_is_fx_tracing_flag\b|^_is_fx_tracing_tls\b"),
        "reader": find(tracing, r"^\s+return .*is_compiling\(\)", after="def is_fx_symbolic_tracing"),
        "forward_lock": find("_dynamo/convert_frame.py", r"^\s+with .*\bcompile_lock\b"),
        "backward_lock": find("_inductor/compile_fx.py", r"^\s+with .*\bcompile_lock\b"),
    }


# --- what happens between threads -----------------------------------------------------------------


class Paused:
    """Work in another thread that stops in its middle. `start(pause)` has to call `pause()`."""

    def __init__(self, start: Callable[[Callable[[], None]], Any]) -> None:
        self._inside, self._go_on = threading.Event(), threading.Event()
        self.error = ""
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)

    def _run(self, start: Callable[[Callable[[], None]], Any]) -> None:
        try:
            start(self._pause)
        except BaseException as error:
            self.error = sentence(error)
        self._inside.set()

    def _pause(self) -> None:
        self._inside.set()
        self._go_on.wait(_STEP)

    def end(self) -> None:
        self._go_on.set()
        self._thread.join(_STEP)

    def __enter__(self) -> "Paused":
        self._thread.start()
        if not self._inside.wait(_STEP) or self.error:
            raise RuntimeError("the other thread did not get there: %s" % (self.error or "it waits"))
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def tracing(pause: Callable[[], None]) -> None:
    """A trace that pauses in its middle."""

    def traced(x: Any) -> Any:
        pause()
        return x

    module("torch.fx").Tracer().trace(traced)


def compiling(pause: Callable[[], None], within: bool = False) -> None:
    """A compilation that pauses in its middle; with `within`, where its backend traces in turn."""
    torch = module("torch")

    def backend(graph: Any, _: Any) -> Any:
        tracing(pause) if within else pause()
        return graph.forward

    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))


def compiled() -> Callable[[], None]:
    """A call of a function that was compiled before."""
    torch = module("torch")
    function = torch.compile(lambda x: x + 1, backend="eager")
    function(torch.ones(2))
    return lambda: function(torch.ones(2))


def failing(call: Question) -> Any:
    """What the call raises, or null."""
    try:
        call()
    except Exception as error:
        return sentence(error)
    return None


def call_during_trace() -> Any:
    call = compiled()
    with Paused(tracing):
        return failing(call)


def call_during_compile() -> Any:
    call = compiled()
    with Paused(lambda pause: compiling(pause, within=True)):
        return failing(call)


def flag_shared() -> bool:
    """Whether this thread sees that another one traces."""
    fx = module("torch.fx._symbolic_trace")
    with Paused(tracing):
        return bool(fx.is_fx_symbolic_tracing())


def compiling_shared() -> bool:
    """Whether `is_compiling()`, which masks the flag, is true here while another thread compiles."""
    torch = module("torch")
    with Paused(compiling):
        return bool(torch.compiler.is_compiling())


def module_during_trace() -> Any:
    torch = module("torch")
    linear = torch.nn.Linear(2, 2)
    with Paused(tracing):
        return failing(lambda: linear(torch.ones(1, 2)))


def left_by_overlap() -> Dict[str, Any]:
    """What two overlapping traces leave behind, of which the first to begin is the first to end."""
    torch = module("torch")
    fx = module("torch.fx._symbolic_trace")
    call = compiled()
    with Paused(tracing) as first, Paused(tracing) as second:
        first.end()
        second.end()
    return {
        "call": failing(call),
        "flag": bool(fx.is_fx_symbolic_tracing()),
        "patcher": fx.CURRENT_PATCHER is not None,
        "module": torch.nn.Module.__call__ is not fx._orig_module_call,
        "errors": [one.error for one in (first, second) if one.error],
    }


def config_per_thread() -> bool:
    """Whether a setting of torch._dynamo.config made in one thread is unknown to others."""
    config = module("torch._dynamo.config")
    before, seen = config.recompile_limit, []
    config.recompile_limit = before + 1
    thread = threading.Thread(target=lambda: seen.append(config.recompile_limit))
    thread.start()
    thread.join(_STEP)
    return bool(seen[0] == before)


def settings() -> Dict[str, Any]:
    """What a program finds set at its start."""
    torch = module("torch")
    config = module("torch._dynamo.config")
    frame = module("torch._dynamo.eval_frame")
    flex = module("torch.nn.attention.flex_attention")
    names = (
        "error_on_nested_fx_trace",
        "suppress_errors",
        "disable",
        "force_compile_during_fx_trace",
        "fail_on_recompile_limit_hit",
        "recompile_limit",
        "debug_backend_override",
    )
    found = {name: getattr(config, name) for name in names if hasattr(config, name)}
    debug = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if hasattr(flex, debug):
        found[debug] = bool(getattr(flex, debug))
    found["stance"] = str(frame._stance.stance)
    found["num_threads"] = torch.get_num_threads()
    return found


def guard_binds() -> bool:
    """Whether torch's dense flex attention looks its inner function up by name, so that a guard can take its place."""
    found = module("torch._higher_order_ops.flex_attention")
    name = "_math_attention_inner"
    return bool(
        hasattr(found, name)
        and found.sdpa_dense.__globals__ is found.__dict__
        and found.sdpa_dense_backward.__globals__ is found.__dict__
        and name in found.sdpa_dense_backward.__code__.co_names
    )


QUESTIONS: Dict[str, Question] = {
    "settings": settings,
    "flag_shared": flag_shared,
    "compiling_shared": compiling_shared,
    "call_during_trace": call_during_trace,
    "call_during_compile": call_during_compile,
    "module_during_trace": module_during_trace,
    "left_by_overlap": left_by_overlap,
    "config_per_thread": config_per_thread,
    "guard_binds": guard_binds,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
