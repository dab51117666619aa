"""One try of `benchmarks.compile_race`, in a process of its own: threads that use compiled flex attention at once.

It writes its findings as JSON; a process that hangs writes the stacks of its threads and ends.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import importlib
import json
import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainer import compile_guard
from trainer.compile_guard import private

# the first is what all scenarios use, the other is new to `lengths`. Each worker has its own number of heads, and all
# shapes together must stay below torch's limit of 8 compilations of one function, which no guard can lift
LENGTHS = (256, 384)
WIDTH = 64


@dataclass(frozen=True)
class Try:
    """What one process does. `seconds`: how long its threads go on; `limit`: seconds after which it hangs."""

    scenario: str
    layout: str
    guarded: bool
    device: str
    threads: int
    seconds: float
    limit: float


class Race:
    """Workers, what they meet, and what other threads do meanwhile."""

    def __init__(self, what: Try) -> None:
        self.what = what
        self.stop = threading.Event()
        self.calls: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self.dense = 0
        self.guard = compile_guard.install() if what.guarded else None
        if not what.guarded:
            self._count_dense()
        several = torch.cuda.device_count() if what.device == "cuda" and what.layout == "several" else 1
        names = [f"cuda:{one % several}" if what.device == "cuda" else "cpu" for one in range(what.threads)]
        self.workers = [Worker(self, number, torch.device(name)) for number, name in enumerate(names)]

    def _count_dense(self) -> None:
        module = importlib.import_module("torch._higher_order_ops.flex_attention")
        original = module._math_attention_inner

        def counted(*args: Any, **options: Any) -> Any:
            self.dense += 1
            return original(*args, **options)

        module._math_attention_inner = counted

    @property
    def gradients(self) -> bool:
        return self.what.device == "cuda"  # flex attention has no backward pass on the CPU

    @property
    def shared(self) -> bool:
        """Whether the workers share a GPU."""
        return self.what.device == "cuda" and len({worker.device for worker in self.workers}) < len(self.workers)

    def attempt(self, what: str, work: Callable[[], Any], expected: str = "") -> None:
        """Do it, and count it or what it raised; what contains `expected` is no error."""
        try:
            work()
        except Exception as error:
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            if expected and expected in str(error):
                text = ""
            with self._lock:
                self.calls[what] += 1
                self.errors[f"{what}: {text}"] += bool(text)
            return
        with self._lock:
            self.calls[what] += 1

    def run(self, *bodies: Callable[[], None], seconds: float | None = None) -> None:
        threads = [threading.Thread(target=body, name=f"worker-{number}") for number, body in enumerate(bodies)]
        for thread in threads:
            thread.start()
        if seconds is not None:
            self.stop.wait(seconds)
            self.stop.set()
        for thread in threads:
            thread.join()


class Worker:
    """One thread's share: its own compiled function and its own number of heads, so that it compiles for itself."""

    def __init__(self, race: Race, number: int, device: torch.device) -> None:
        self.race, self.heads, self.device = race, 1 + number, device
        self.function: Any = None

    def wrap(self) -> None:
        self.function = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def step(self, length: int = LENGTHS[0]) -> None:
        """Forward, and on a GPU backward. The block mask is made anew: no function of it is compiled."""
        grad = self.race.gradients
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the thread's
        kind = torch.bfloat16 if grad else torch.float32
        shape = (1, self.heads, length, WIDTH)
        q, k, v = (torch.randn(shape, device=self.device, dtype=kind, requires_grad=grad) for _ in range(3))
        mask = create_block_mask(_causal, None, None, length, length, device=str(self.device))
        with torch.set_grad_enabled(grad):
            out = self.function(q, k, v, block_mask=mask)
            if grad:
                out.sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


# --- scenarios --------------------------------------------------------------------------------------


def cold(race: Race) -> None:
    """All workers make their first call at the same moment."""
    start = threading.Barrier(len(race.workers))

    def body(worker: Worker) -> None:
        worker.wrap()
        start.wait()
        for _ in range(5):
            race.attempt("call", worker.step)

    if race.guard is None:
        race.run(*(lambda worker=worker: body(worker) for worker in race.workers))
    else:
        _guarded(race, LENGTHS[:1], lambda worker: [race.attempt("call", worker.step) for _ in range(5)])


def warm(race: Race) -> None:
    """Warmed workers call while another thread compiles other things."""

    def compile_another() -> None:
        torch.compile(_fresh(), backend="aot_eager")(torch.ones(8))

    _beside(race, compile_another, "recompil" if race.guard else "")


def traces(race: Race) -> None:
    """Warmed workers call while two threads trace without compiling."""
    _beside(race, lambda: make_fx(_fresh())(torch.ones(8)), noisy=2)


def modules(race: Race) -> None:
    """Workers call a plain module while another thread traces a module."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
    other = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))

    def body(_: Worker) -> None:
        while not race.stop.is_set():
            race.attempt("module", lambda: net(torch.ones(4, 16)).sum().item())

    def noise() -> None:
        while not race.stop.is_set():
            race.attempt("trace", lambda: torch.fx.symbolic_trace(other))

    race.run(*(lambda worker=worker: body(worker) for worker in race.workers), noise, seconds=race.what.seconds)


def lengths(race: Race) -> None:
    """Workers meet new lengths, each in an order of its own; under the guard they were warmed."""

    def body(worker: Worker) -> None:
        for turn in range(2 * len(LENGTHS)):
            length = LENGTHS[(turn + worker.heads) % len(LENGTHS)]
            race.attempt("call", lambda length=length: worker.step(length))

    if race.guard is not None:
        _guarded(race, LENGTHS, body)
        race.attempt("sealed", lambda: race.workers[0].step(768), "recompil")
        return
    for worker in race.workers:
        worker.wrap()
        race.attempt("first call", worker.step)
    race.run(*(lambda worker=worker: body(worker) for worker in race.workers))


SCENARIOS = {"cold": cold, "warm": warm, "traces": traces, "modules": modules, "lengths": lengths}


def _beside(race: Race, noise: Callable[[], Any], expected: str = "", noisy: int = 1) -> None:
    """Warmed workers that call for some seconds, and other threads that make noise."""

    def body(worker: Worker) -> None:
        while not race.stop.is_set():
            race.attempt("call", worker.step)

    def disturb() -> None:
        while not race.stop.is_set():
            race.attempt("noise", noise, expected)

    if race.guard is not None:
        others = [threading.Thread(target=disturb) for _ in range(noisy)]

        def begin() -> None:
            for thread in others:
                thread.start()

        _guarded(race, LENGTHS[:1], body, begin, seconds=race.what.seconds)
        for thread in others:
            thread.join()
        return
    for worker in race.workers:
        worker.wrap()
        race.attempt("first call", worker.step)
    bodies = [lambda worker=worker: body(worker) for worker in race.workers]
    race.run(*bodies, *[disturb] * noisy, seconds=race.what.seconds)


def _guarded(
    race: Race,
    warmed: tuple[int, ...],
    body: Callable[[Worker], Any],
    begin: Callable[[], None] = lambda: None,
    seconds: float | None = None,
) -> None:
    """Warm, seal, then all at once. Workers on one GPU are warmed by one thread, since the guard refuses two."""
    guard, workers = race.guard, race.workers
    assert guard is not None
    ready = threading.Barrier(len(workers) + 1)

    def warm_up(worker: Worker) -> None:
        worker.wrap()
        for length in warmed:
            guard.warm(worker.step, length)

    def train(worker: Worker) -> None:
        body(worker)
        race.attempt("check", guard.check)

    def with_own_device(worker: Worker) -> None:
        with _released(ready), guard.thread(worker.device):
            warm_up(worker)
            guard.seal(threads=len(workers))
            ready.wait()
            train(worker)

    def after_the_seal(worker: Worker) -> None:
        with guard.thread(worker.device):
            ready.wait()
            train(worker)

    if race.shared:
        with guard.thread(workers[0].device):
            race.run(lambda: race.attempt("second thread on the GPU", lambda: _refused(guard, workers[0].device)))
            for worker in workers:
                warm_up(worker)
            guard.seal(threads=1)
    each = after_the_seal if race.shared else with_own_device

    def clock() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait()
            begin()
            if seconds is not None:
                race.stop.wait(seconds)
        race.stop.set()

    race.run(*(lambda worker=worker: race.attempt("worker", lambda: each(worker)) for worker in workers), clock)


@contextlib.contextmanager
def _released(barrier: threading.Barrier) -> Iterator[None]:
    """Whoever fails lets the others go."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def _refused(guard: compile_guard.Guard, device: torch.device) -> None:
    try:
        with guard.thread(device):
            pass
    except compile_guard.CompileGuardError:
        return
    raise AssertionError("the guard let a second thread train on the GPU before the seal")


def _pattern(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.cos(x) + 1


_made = 0


def _fresh() -> Any:
    """A function that nobody has compiled: Dynamo keeps what it compiled by code object."""
    global _made
    _made += 1
    code = _pattern.__code__.replace(co_name=f"pattern_{_made}", co_firstlineno=_pattern.__code__.co_firstlineno)
    return types.FunctionType(code, globals(), f"pattern_{_made}")


# --- the process ------------------------------------------------------------------------------------


def run(what: Try, answer: Path, stacks: Path) -> None:
    """Do it, and write what came of it into `answer`; `stacks` gets the stacks of a process that hangs."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if torch.version.cuda and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None  # crashes where a CUDA build sees no GPU
    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(what.limit, exit=True, file=file)
        race = Race(what)
        race.attempt("scenario", lambda: SCENARIOS[what.scenario](race))
        faulthandler.cancel_dump_traceback_later()
    try:
        left: list[str] | None = private.poison(private.find())
    except private.BindError:
        left = None
    found = {
        "try": asdict(what),
        "torch": str(torch.__version__),
        "calls": dict(race.calls),
        "errors": {text: count for text, count in race.errors.items() if count},
        "dense": race.dense,
        "left": left,
    }
    answer.write_text(json.dumps(found))
    os._exit(0)  # threads of torch that do not end are no part of the question
