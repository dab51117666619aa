"""The baseline: an n-gram drafter, which any trained drafter has to beat.

It drafts one token after another. First prompt lookup: the longest suffix of the row so far (up to LONGEST tokens, at
least SHORTEST) that occurred earlier in the row, continued as it was the last time. Failing that, the most frequent
successor of the last n tokens in the drafter's training rows, with n from the highest order down to 0.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from trainer.proposers import Proposal

LONGEST, SHORTEST, ORDER = 12, 3, 4


class Counts:
    """Most frequent successor of every context of 0 … `order` tokens in the given documents."""

    def __init__(self, documents: Iterable[np.ndarray], order: int = ORDER):
        documents = [np.asarray(document, np.int64) for document in documents]
        self.order = order
        self.best = [_most_frequent(documents, n) for n in range(order + 1)]

    def next(self, history: list[int]) -> int:
        for n in range(min(self.order, len(history)), -1, -1):
            token = self.best[n].get(_key(history[len(history) - n :]))
            if token is not None:
                return token
        raise AssertionError("order 0 always knows a token")


_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _key(tokens: list[int]) -> int:
    """A 64-bit hash of a context; a collision would only make one draft worse."""
    key = len(tokens)
    for token in tokens:
        key = (key * _MULTIPLIER + token + 1) & _WORD
    return key


def _most_frequent(documents: list[np.ndarray], n: int) -> dict[int, int]:
    keys, successors = [], []
    for document in documents:
        if len(document) <= n:
            continue
        key = np.full(len(document) - n, n, np.uint64)
        for i in range(n):
            key = key * np.uint64(_MULTIPLIER) + document[i : len(document) - n + i].astype(np.uint64) + np.uint64(1)
        keys.append(key)
        successors.append(document[n:])
    if not keys:
        return {0: 0} if n == 0 else {}
    key, successor = np.concatenate(keys), np.concatenate(successors)
    order = np.lexsort((successor, key))
    key, successor = key[order], successor[order]
    first = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]) | (successor[1:] != successor[:-1])])
    count = np.diff(np.r_[first, len(key)])
    key, successor = key[first], successor[first]
    order = np.lexsort((-count, key))  # stable: of equally frequent successors the lowest token wins
    key, successor = key[order], successor[order]
    lead = np.r_[True, key[1:] != key[:-1]]
    return dict(zip(key[lead].tolist(), successor[lead].tolist(), strict=True))


class NGramProposer:
    """A Proposer (proposers.py) that is certain of its drafts: it has no distribution to sample them from."""

    def __init__(self, counts: Counts, *, size: int):
        self.counts, self.size = counts, size

    def begin(self, features: Tensor, lengths: Tensor) -> None:
        self.seen: list[dict[tuple[int, ...], int]] = [{} for _ in range(len(lengths))]
        self.indexed = [0] * len(lengths)

    def propose(self, histories: list[list[int]], start: Tensor) -> Proposal:
        for row, history in enumerate(histories):
            self._index(row, history)
        drafts = [self._continue(row, history) for row, history in enumerate(histories)]
        return Proposal(tokens=torch.tensor(drafts, device=start.device))

    def _index(self, row: int, history: list[int]) -> None:
        """Note where each n-gram of the row ends, for those ends that have a successor."""
        for end in range(max(1, self.indexed[row]), len(history)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.seen[row][tuple(history[end - n : end])] = end
        self.indexed[row] = len(history)

    def _continue(self, row: int, history: list[int]) -> list[int]:
        recent, drafts = history[-LONGEST:], []
        for _ in range(self.size):
            draft = None
            for n in range(min(LONGEST, len(recent)), SHORTEST - 1, -1):
                end = self.seen[row].get(tuple(recent[len(recent) - n :]))
                if end is not None:
                    draft = history[end]
                    break
            drafts.append(self.counts.next(recent) if draft is None else draft)
            recent = [*recent, drafts[-1]][-LONGEST:]
        return drafts

    def accept(self, features: Tensor, positions: Tensor) -> None:
        pass

    def keep(self, rows: Tensor) -> None:
        self.seen = [self.seen[row] for row in rows.tolist()]
        self.indexed = [self.indexed[row] for row in rows.tolist()]
