"""`--explain`: what a command would run at the place, and how often it would ask, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config import Place
from orchestrator.place.container import kind_of
from orchestrator.place.session import explain


def explanation(place: Place, requests: Sequence[str]) -> str:
    """The remote line, the requests over the channel it opens, and the counts of all three.

    `requests` are one line each, in their order; a round trip each, and one for the greeting.
    """
    lines = [f"{place.name}: {counts(place, len(requests))}"]
    lines += [f"  {line}" for line in explain(place)]
    if requests:
        lines.append("over that channel, in this order:")
        lines += [f"  {number}. {request}" for number, request in enumerate(requests, start=1)]
    return "\n".join(lines)


def counts(place: Place, requests: int) -> str:
    """`1 connection, 1 pct exec, 3 round trips`."""
    connections = 0 if place.host.ssh is None else 1
    parts = [f"{connections} connection{'' if connections == 1 else 's'}"]
    if place.container is not None:
        parts.append(f"1 {kind_of(place.container).enter}")
    else:
        parts.append("1 command")
    trips = requests + 1
    parts.append(f"{trips} round trip{'' if trips == 1 else 's'}")
    return ", ".join(parts)
