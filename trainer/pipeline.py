"""Features from target ranks to drafter ranks, point to point, while the previous batch trains.

Both sides know from the seed which rows a batch has; only what the target computed travels: one contiguous buffer,
features [R, S, K*H] and, where a loss compares distributions, last hidden states [R, S, H] behind them.

Drafters ask. A target makes its batches in their order, up to two ahead of what has been asked for, and sends each
when its eater's request comes; then it says `ready` and the data follow. So nothing spins on a GPU waiting for a peer,
a drafter can end at any step, and it can ask for other things between batches (see serve.py): a request is one number.
Memory: two buffers at a target; at a drafter one more than the batches of a step that it keeps, and never more.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import TrainerError
from trainer.world import Pair, World

STOP, EVALUATE = -1, -2  # requests that are no batch
ASK, READY = 0, 1  # tags of messages between one pair


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What travels: shapes of one batch, in elements of `dtype`."""

    rows: int
    length: int
    features: int  # K*H
    hidden: int  # H, or 0 where last hidden states are not wanted
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.rows * self.length * (self.features + self.hidden) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.rows * self.length * (self.features + self.hidden), dtype=self.dtype, device=device)

    def split(self, buffer: Tensor) -> tuple[Tensor | None, Tensor]:
        """Views: last hidden states [R, S, H] or None, features [R, S, K*H]."""
        first = self.rows * self.length * self.features
        features = buffer[:first].view(self.rows, self.length, self.features)
        last = buffer[first:].view(self.rows, self.length, self.hidden) if self.hidden else None
        return last, features


def _number(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


def _send(buffer: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """gloo carries host memory only."""
    dist.send(buffer.cpu() if dist.get_backend(group) == "gloo" else buffer, peer, group=group)


def _receive(buffer: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) == "gloo" and buffer.is_cuda:
        host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        dist.recv(host, peer, group=group)
        buffer.copy_(host)
    else:
        dist.recv(buffer, peer, group=group)


@contextlib.contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[None]:
    """For a thread: on the common stream, a transfer would wait for all the computing that is queued."""
    if device.type == "cuda":
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    else:
        yield


def _wait(device: torch.device) -> None:
    """For what this thread has queued; not for what others have."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@dataclass(kw_only=True)
class Waits:
    """Seconds, of one side since they were last read."""

    busy: float = 0.0
    waiting: float = 0.0
    batches: int = 0

    def take(self) -> "Waits":
        now = Waits(busy=self.busy, waiting=self.waiting, batches=self.batches)
        self.busy = self.waiting = 0.0
        self.batches = 0
        return now


class Requests:
    """At a target: what the drafters ask for, each heard by a thread of its own, in one queue."""

    def __init__(self, world: World):
        self.queue: queue.Queue[tuple[int, int] | BaseException] = queue.Queue()  # drafter rank, request
        self.asked: dict[int, int] = {}
        self.stopped: set[int] = set()
        self.drafters = [pair[1] for pair in world.control]
        for pair, group in world.control.items():
            threading.Thread(target=self._listen, args=(pair, group), name=f"requests-{pair[1]}", daemon=True).start()

    def _listen(self, pair: Pair, group: dist.ProcessGroup) -> None:
        request = _number()
        try:
            while request != STOP:
                dist.recv(request, pair[1], group=group, tag=ASK)
                self.queue.put((pair[1], int(request)))
        except BaseException as error:
            self.queue.put(error)  # whoever waits for a request must not wait for ever

    def await_batch(self, batch: int, drafter: int, other: Callable[[int, int], None]) -> bool:
        """Until `drafter` has asked for `batch`: True, or False if it has stopped. `other` serves what is no batch."""
        while True:
            if drafter in self.asked:  # also of one that has stopped since: it still waits for this
                asked = self.asked.pop(drafter)
                if asked != batch:
                    raise TrainerError(f"rank {drafter} asks for batch {asked}, and its next one here is {batch}")
                return True
            if drafter in self.stopped:
                return False
            self._take(other)

    def await_stops(self, other: Callable[[int, int], None]) -> None:
        while len(self.stopped) < len(self.drafters):
            self._take(other)

    def _take(self, other: Callable[[int, int], None]) -> None:
        entry = self.queue.get()
        if isinstance(entry, BaseException):
            raise entry
        rank, request = entry
        if request == STOP:
            self.stopped.add(rank)
        elif request >= 0:
            self.asked[rank] = request
        else:
            other(rank, request)


class Sender:
    """At a target: makes batches in order and hands each to its eaters, of every variant."""

    def __init__(self, world: World, parcel: Parcel):
        self.world, self.parcel = world, parcel
        self.requests = Requests(world)
        self.buffers = [parcel.empty(world.device) for _ in range(2)]
        self.waits = Waits()

    def run(
        self, batches: Iterator[int], make: Callable[[int, Tensor], None], other: Callable[[int, int], None]
    ) -> None:
        """`make` fills a buffer with a batch; it runs while the one before is under way."""
        free: queue.Queue[Tensor] = queue.Queue()
        made: queue.Queue[tuple[int, Tensor, list[int]] | None] = queue.Queue()
        for buffer in self.buffers:
            free.put(buffer)
        failure: list[BaseException] = []
        courier = threading.Thread(target=self._carry, args=(made, free, failure), name="courier", daemon=True)
        courier.start()
        for batch in batches:
            began = time.perf_counter()
            buffer = free.get()
            if failure:
                raise failure[0]
            self.waits.waiting += time.perf_counter() - began
            began = time.perf_counter()
            make(batch, buffer)
            _wait(self.world.device)
            self.waits.busy += time.perf_counter() - began
            self.waits.batches += 1
            began = time.perf_counter()
            wanted = [
                rank for rank in self.world.topology.eaters(batch) if self.requests.await_batch(batch, rank, other)
            ]
            self.waits.waiting += time.perf_counter() - began
            if not wanted and len(self.requests.stopped) == len(self.requests.drafters):
                break
            made.put((batch, buffer, wanted))
        made.put(None)
        courier.join()
        if failure:
            raise failure[0]
        self.requests.await_stops(other)

    def _carry(self, made: queue.Queue, free: queue.Queue, failure: list[BaseException]) -> None:
        try:
            with _stream_of_its_own(self.world.device):
                while (entry := made.get()) is not None:
                    batch, buffer, wanted = entry
                    for rank in wanted:
                        pair = (self.world.role.rank, rank)
                        dist.send(_number(batch), rank, group=self.world.control[pair], tag=READY)
                        _send(buffer, rank, self.world.data[pair])
                    _wait(self.world.device)
                    free.put(buffer)
        except BaseException as error:
            failure.append(error)
            free.put(None)  # the maker waits for a buffer, or for a request
            self.requests.queue.put(error)


@dataclass(kw_only=True)
class Receiver:
    """At a drafter: asks for its batches in order, one ahead of what it trains on."""

    world: World
    parcel: Parcel
    buffers: int = 2  # of the batch in use, and of the one on its way
    waits: Waits = field(default_factory=Waits)

    def start(self, batches: Iterator[int]) -> None:
        self._free: queue.Queue[tuple[Tensor, torch.cuda.Event | None]] = queue.Queue()
        self._here: queue.Queue[tuple[int, Tensor] | BaseException] = queue.Queue()
        self._stopping = threading.Event()
        for _ in range(self.buffers):
            self._free.put((self.parcel.empty(self.world.device), None))
        self._thread = threading.Thread(target=self._fetch, args=(batches,), name="receiver", daemon=True)
        self._thread.start()

    def _fetch(self, batches: Iterator[int]) -> None:
        try:
            with _stream_of_its_own(self.world.device):
                self._fetch_all(batches)
        except BaseException as error:
            self._here.put(error)

    def _fetch_all(self, batches: Iterator[int]) -> None:
        for batch in batches:
            buffer, used = self._free.get()
            if self._stopping.is_set():
                return
            if used is not None:
                used.synchronize()  # what reads it has run
            pair = (self.world.topology.maker(batch), self.world.role.rank)
            dist.send(_number(batch), pair[0], group=self.world.control[pair], tag=ASK)
            ready = _number()
            dist.recv(ready, pair[0], group=self.world.control[pair], tag=READY)
            if int(ready) != batch:
                raise TrainerError(f"rank {pair[0]} sends batch {int(ready)} in place of {batch}")
            _receive(buffer, pair[0], self.world.data[pair])
            _wait(self.world.device)
            self._here.put((batch, buffer))

    def take(self, batch: int) -> Tensor:
        """The buffer of this batch, which must be the next; `give_back` it when it has been used."""
        began = time.perf_counter()
        entry = self._here.get()
        self.waits.waiting += time.perf_counter() - began
        if isinstance(entry, BaseException):
            raise entry
        if entry[0] != batch:
            raise TrainerError(f"batch {entry[0]} has come, and {batch} is next")
        return entry[1]

    def give_back(self, buffer: Tensor) -> None:
        """When all that reads it has been queued."""
        used = None
        if buffer.is_cuda:
            used = torch.cuda.Event()
            used.record()
        self._free.put((buffer, used))

    def stop(self) -> None:
        """No further batch is wanted. One that has been asked for is still taken, so that nobody is left sending."""
        self._stopping.set()
        self._free.put((torch.empty(0), None))
        self._thread.join()
        for pair, group in self.world.control.items():
            dist.send(_number(STOP), pair[0], group=group, tag=ASK)
