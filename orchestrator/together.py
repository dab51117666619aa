"""The same at several places at once, each of which may fail by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from orchestrator.errors import ConfigError, OrchError

Where = TypeVar("Where")
What = TypeVar("What")


def at_once(
    do: Callable[[Where], What], places: Sequence[Where], give_up: Callable[[], object] = lambda: None
) -> tuple[list[tuple[Where, What]], list[OrchError]]:
    """(what came of it, errors), both in the order of the places. Where this is interrupted, `give_up` is called: it
    has to end what is waited for."""
    if len(places) == 1:
        try:
            return [(places[0], do(places[0]))], []
        except OrchError as error:
            return [], [error]
    done, errors = [], []
    with ThreadPoolExecutor(max_workers=max(1, len(places))) as pool:
        futures = [pool.submit(do, place) for place in places]
        try:
            for place, future in zip(places, futures, strict=True):
                try:
                    done.append((place, future.result()))
                except OrchError as error:
                    errors.append(error)
        except BaseException:
            give_up()
            raise
    return done, errors


def joined(errors: Sequence[OrchError]) -> OrchError:
    """One error that says what all of them say; its kind and its hint are the first one's."""
    messages = list(dict.fromkeys(error.message for error in errors))
    if len(messages) == 1:
        return errors[0]
    if isinstance(errors[0], ConfigError):
        return ConfigError(messages, errors[0].hint)
    return type(errors[0])("\n".join(messages), errors[0].hint)
