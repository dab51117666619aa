"""The next steps' batches are made while the present one trains."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over make(step) for every step, in order, up to `depth` of them made ahead in a thread.

    `make` should be a pure function: nothing here depends on when it runs. What it raises is raised where its result
    would have come. Leaving the `with` block, or `close`, ends the thread; a call of `make` under way is waited for.
    """

    def __init__(self, make: Callable[[int], Item], steps: Iterable[int], *, depth: int = 2):
        self._made: queue.Queue[tuple[Item | None, BaseException | None, bool]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make, steps), name="batches", daemon=True)
        self._thread.start()

    def _work(self, make: Callable[[int], Item], steps: Iterable[int]) -> None:
        try:
            for step in steps:
                if self._closed.is_set() or not self._put((make(step), None, False)):
                    return
            self._put((None, None, True))
        except BaseException as error:
            self._put((None, error, True))

    def _put(self, entry: tuple[Item | None, BaseException | None, bool]) -> bool:
        while not self._closed.is_set():
            try:
                self._made.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Item]:
        while not self._closed.is_set():
            item, error, last = self._made.get()
            if last:
                self.close()
            if error is not None:
                raise error
            if not last:
                yield item  # type: ignore[misc]

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "Prefetcher[Item]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
