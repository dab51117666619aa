"""The order of a threaded trainer: register, warm one at a time, seal, and look for poison at each step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from trainer.compile_guard import private
from trainer.compile_guard.private import WAIT, CompileGuardError

Result = TypeVar("Result")

_STANCE = "fail_on_recompile"


class PoisonedError(CompileGuardError):
    """The process's compile state is broken for good."""


@dataclass
class _Member:
    """A training thread."""

    name: str
    device: torch.device
    doing: str = "has not begun to compile"
    since: float = field(default_factory=time.monotonic)

    def does(self, what: str) -> None:
        self.doing, self.since = what, time.monotonic()

    def __str__(self) -> str:
        return f"{self.name} ({self.device}) {self.doing}, since {time.monotonic() - self.since:.0f} s"


class Guard:
    """What `install` gives; one a process."""

    def __init__(self, found: private.Torch, patches: private.Patches) -> None:
        self._torch = found
        self._patches = patches
        self._warming = threading.RLock()
        self._state = threading.Condition()
        self._members: dict[int, _Member] = {}  # by thread
        self._arrived: dict[int, int] = {}  # thread -> how many it said there are
        self._sealed = False
        self._failure: tuple[type[CompileGuardError], str] | None = None  # the first, for all threads

    @property
    def sealed(self) -> bool:
        return self._sealed

    def describe(self) -> str:
        """What holds with this torch, in one line for a log."""
        flag = "made the thread's" if self._torch.shared_flag else "the thread's already"
        known = "" if private.tested() else ", a version that the guard was not tested with"
        return (
            f"compile guard on torch {torch.__version__}{known}: tracing flag {flag}, one trace or compilation at a "
            f"time, patches of nn.Module bound to their thread"
        )

    @contextlib.contextmanager
    def thread(self, device: torch.device | str | int) -> Iterator[None]:
        """The body of one training thread. If it fails before the seal, the threads that wait for it fail too.

        Raises:
            CompileGuardError: another thread trains on this GPU before the seal, the thread is registered already,
                or a setting of this thread makes compiling unsafe.
        """
        me, key = _Member(threading.current_thread().name, _which(device)), threading.get_ident()
        with self._state:
            self._refuse(me, key)
            self._members[key] = me
        try:
            yield
        except BaseException as error:
            self._fail(f"{me.name} ended before the seal ({type(error).__name__}: {_first_line(error)})")
            raise
        finally:
            with self._state:
                self._members.pop(key, None)
                self._state.notify_all()

    def warm(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Call `function` while no other thread warms; it has to run forward and backward, both of which compile at
        their first call. Once for each combination of shapes, types and gradient mode.

        Raises:
            CompileGuardError: not in a registered thread, after the seal, when another thread has failed, or when
                the others take more than WAIT seconds. What `function` raises.
        """
        me = self._me("warm")
        if self._sealed:
            raise CompileGuardError(
                "the compile guard is sealed, so that nothing can be warmed any more: warm every shape before seal()"
            )
        me.does("waits to compile")
        self._take_turn(me)
        try:
            self._raise_failure()
            self._raise_traps()
            me.does("compiles")
            return function(*args, **options)
        finally:
            me.does("has compiled")
            self._warming.release()

    def seal(self, threads: int, wait: float = WAIT) -> None:
        """Wait until `threads` registered threads are here; from then on a recompilation raises, in all threads.

        Raises:
            CompileGuardError: a thread failed, `wait` seconds passed (it names who is missing), two threads expect
                different numbers, or something set another stance meanwhile.
            PoisonedError: the warm-up left the process poisoned.
        """
        me, key = self._me("seal"), threading.get_ident()
        end = time.monotonic() + wait
        with self._state:
            if self._sealed:
                raise CompileGuardError("the compile guard is sealed already: call seal() once in each thread")
            others = sorted({number for number in self._arrived.values() if number != threads})
            if others:
                self._fail(f"{me.name} seals for {threads} threads, others for {', '.join(map(str, others))}")
            self._arrived[key] = threads
            me.does("waits for the seal")
            if len(self._arrived) == threads and not self._failure:
                self._close()
            while not (self._sealed or self._failure) and (left := end - time.monotonic()) > 0:
                self._state.wait(left)
            if not (self._sealed or self._failure):
                missing = [str(one) for thread, one in self._members.items() if thread not in self._arrived]
                self._fail(
                    f"only {len(self._arrived)} of {threads} threads came to the seal within {wait:g} s; "
                    f"missing: {'; '.join(missing) or 'threads that did not register'}"
                )
            self._raise_failure()

    def check(self) -> None:
        """To be called between two steps; costs a microsecond while all is well.

        Raises:
            PoisonedError: a trace has left something behind, or what the guard put in place is gone.
            CompileGuardError: another thread traces or compiles for more than WAIT seconds.
        """
        if not (private.poison(self._torch) or self._changed()):
            return
        with private.held(self._torch.lock):  # nothing is traced now, so that what is left stays
            found = private.poison(self._torch) + self._changed()
        if found:
            raise PoisonedError(
                f"{'; '.join(found)}. Nothing that this process compiles or traces can be trusted any more: end it "
                f"and go on from the last checkpoint"
            )

    def _changed(self) -> list[str]:
        found = self._patches.lost()
        if self._sealed and (now := private.stance(self._torch)) != _STANCE:
            found.append(f'the seal is broken: somebody set the stance of torch.compile to "{now}"')
        return found

    def _refuse(self, me: _Member, key: int) -> None:
        if key in self._members:
            raise CompileGuardError(f"{me.name} is registered already, with {self._members[key].device}")
        self._raise_failure()
        self._raise_traps()
        same = [one for one in self._members.values() if one.device == me.device and me.device.type != "cpu"]
        if same and not self._sealed:
            raise CompileGuardError(
                f"{me.name} and {same[0].name} would both train on {me.device} before the seal: torch compiles a "
                f"backward pass in that GPU's own autograd thread, for which one of them can wait for ever while it "
                f"keeps it from compiling. Give each its own GPU, or use one process each"
            )

    def _take_turn(self, me: _Member) -> None:
        end = time.monotonic() + WAIT
        while not self._warming.acquire(timeout=0.2):
            self._raise_failure()
            if time.monotonic() > end:
                others = [str(one) for one in self._members.values() if one is not me]
                raise CompileGuardError(f"{me.name} waited {WAIT:.0f} s for its turn to compile: {'; '.join(others)}")

    def _close(self) -> None:
        """Seal, or say why not. Under the lock, so that nothing is being traced."""
        with self._or_fail(), private.held(self._torch.lock):
            found = private.poison(self._torch) + self._patches.lost()
            if found:
                self._fail(f"the warm-up left the process poisoned: {'; '.join(found)}", PoisonedError)
            elif (now := private.stance(self._torch)) != "default":
                self._fail(f'torch.compile has the stance "{now}", so that what was warmed was not compiled')
            else:
                torch.compiler.set_stance(_STANCE)
                self._sealed = True
        self._state.notify_all()

    @contextlib.contextmanager
    def _or_fail(self) -> Iterator[None]:
        """What keeps this thread from going on keeps all."""
        try:
            yield
        except CompileGuardError as error:
            self._fail(str(error))

    def _me(self, what: str) -> _Member:
        me = self._members.get(threading.get_ident())
        if me is None:
            raise CompileGuardError(
                f"{what}() is called in {threading.current_thread().name}, which is not registered: call it inside "
                f"`with guard.thread(device):`"
            )
        return me

    def _fail(self, why: str, kind: type[CompileGuardError] = CompileGuardError) -> None:
        with self._state:
            if not (self._sealed or self._failure):
                self._failure = (kind, why)
            self._state.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            kind, why = self._failure
            raise kind(f"no thread starts to train: {why}")

    def _raise_traps(self) -> None:
        bad = private.traps(self._torch)
        if not self._sealed and (now := private.stance(self._torch)) != "default":
            bad.append(f'the stance of torch.compile is "{now}": what is warmed would not be compiled')
        if bad:
            raise CompileGuardError(f"{threading.current_thread().name} cannot be made safe: {'; '.join(bad)}")


_installed: Guard | None = None
_installing = threading.Lock()


def install(*, dense: bool = True) -> Guard:
    """Put the guard in place, once however often it is called. Call it before anything is compiled or traced.

    `dense`: also `trainer.dense_guard`, which refuses flex attention that would build its scores.

    Raises:
        CompileGuardError: this torch cannot be guarded, a setting makes compiling unsafe, or a trace is under way.
        PoisonedError: the process is poisoned already.
    """
    global _installed
    with _installing:
        if _installed is None:
            _installed = _bind()
        if dense:
            from trainer import dense_guard

            dense_guard.install()
        return _installed


def remove() -> None:
    """Take the guard away and break its seal, all as it was. For tests."""
    global _installed
    with _installing:
        if _installed is not None:
            if _installed._sealed:
                torch.compiler.set_stance("default")
            _installed._patches.undo()
            _installed = None


def _bind() -> Guard:
    try:
        found = private.find()
        guard = Guard(found, private.Patches(found))
        guard._raise_traps()
        with private.held(found.lock):
            left = private.poison(found)
            if left:
                raise PoisonedError(
                    f"{'; '.join(left)}. Install the guard at the start of the program, before anything is traced"
                )
            guard._patches.apply()
    except private.BindError as error:
        raise CompileGuardError(
            f"threads that compile cannot be guarded: {error}; use a torch from 2.11 to 2.14, or one process each"
        ) from None
    return guard


def _which(device: torch.device | str | int) -> torch.device:
    """A device with its index."""
    found = torch.device(device)
    if found.type == "cpu" or found.index is not None:
        return torch.device("cpu") if found.type == "cpu" else found
    return torch.device(found.type, torch.get_device_module(found.type).current_device())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
