"""What a log of any size says that a diagnosis can rest on: lines that rules meet, tracebacks whole, its end.

The rules come with the request, as data: `{"literals": [text], "regex": text}`. A line that holds a literal of a rule
is tried against its regular expression, after a prefix (time, rank) is taken off. Of each rule the first and the last
matches are kept, so that the answer is small however large the log is.
"""

from __future__ import annotations

import collections
import os
import re
from typing import Any, Deque, Dict, List, Optional, Pattern, Sequence, Set, Tuple

from .evidence_find import Finder
from .evidence_trace import MOST, Traceback, read_traceback
from .rundir import open_file

TRACEBACK = b"Traceback (most recent call last)"
FIRST, LAST = 12, 12  # of each rule
TRACEBACKS = 8  # first ones, and as many last ones
TAIL = 48 << 10
ENOUGH = 3000  # of one literal: it is not looked for any longer but at the log's end
END = 1 << 20  # bytes at the end that are looked at with every literal
BIG = 64 << 20  # a log beyond this is searched for GATES alone, and around what they find for everything
NEAR = 128 << 10
ENDS = 8 << 20
OFTEN = 20000  # lines with a gate: from then on the literals that it stands for are looked for in its place
# what nearly every line that a rule knows holds: two dozen words are found in a third of the time that hundreds take
GATES = (
    TRACEBACK,
    b"Error",
    b"ERROR",
    b"error:",
    b"ailed",
    b"illed",
    b"Warning: ",
    b"NVRM: Xid",
    b"hit config.",
    b"out of memory",
    b"No space left",
    b"terminate called",
    b"fault",
    b"oss is ",
)
LONGEST = 4096  # bytes of a line
FOLLOWING, OF_EACH = 24, 400

Answer = Dict[str, Any]


class _Rule:
    def __init__(self, index: int, rule: Dict[str, Any]) -> None:
        self.index = index
        self.literals = [str(text).encode("utf-8") for text in rule["literals"]]
        self.regex: Pattern[str] = re.compile(rule["regex"])
        self.count = 0
        self.first: List[Answer] = []
        self.last: Deque[Answer] = collections.deque(maxlen=LAST)

    def keep(self, match: Answer) -> None:
        self.count += 1
        if len(self.first) < FIRST:
            self.first.append(match)
        else:
            self.last.append(match)


class Scan:
    """One pass over one file."""

    def __init__(self, path: str, rules: Sequence[Dict[str, Any]], prefix: str) -> None:
        self.path = path
        self.rules = [_Rule(index, rule) for index, rule in enumerate(rules)]
        self._prefix = re.compile(prefix)
        self._by_literal: Dict[bytes, List[_Rule]] = {TRACEBACK: []}
        for rule in self.rules:
            for literal in rule.literals:
                self._by_literal.setdefault(literal, []).append(rule)
        self._seen: Dict[bytes, int] = dict.fromkeys(self._by_literal, 0)
        self._traces_first: List[Tuple[int, int]] = []
        self._traces_last: Deque[Tuple[int, int]] = collections.deque(maxlen=TRACEBACKS)
        self._traces = 0
        self._noted: Set[int] = set()
        self._wanted: Dict[int, int] = {}  # tracebacks that a kept match stands in
        self._latest: Dict[str, Tuple[int, int]] = {}  # the last traceback's beginning, by its prefix
        self._line_end = -1  # up to where lines have been tried
        self._line = b""
        self._fd = -1

    def run(self, plain: bool = False) -> Answer:
        """`{"size", "matches", "tracebacks", "more_tracebacks", "tail", "why"}`; see `facts.Log`, which is made of
        it."""
        answer: Answer = {"size": 0, "matches": [], "tracebacks": [], "more_tracebacks": 0}
        answer.update({"tail": {"offset": 0, "text": ""}, "why": None})
        try:
            with open_file(self.path) as f:
                self._fd = f.fileno()
                size = os.fstat(self._fd).st_size
                self._look(size, plain)
                answer["size"] = size
                answer["matches"] = self._matches()
                answer["tracebacks"] = self._tracebacks()
                answer["more_tracebacks"] = max(0, self._traces - len(answer["tracebacks"]))
                start = max(0, size - TAIL)
                data = os.pread(self._fd, size - start, start)
                answer["tail"] = {"offset": start, "text": data.decode("utf-8", "replace")}
        except OSError as e:
            answer["why"] = "%s: %s" % (os.path.basename(self.path), e.strerror)
        return answer

    def _look(self, size: int, plain: bool) -> None:
        literals = list(self._by_literal)
        big = size > BIG and not plain
        rest = [literal for literal in literals if not any(gate in literal for gate in GATES)] if big else []
        if rest:
            self._near(0, ENDS, rest)
        finder = Finder(self.path, GATES if big else literals, size)
        often = dict.fromkeys(GATES, 0)
        dropped_at = None
        for offset, number in finder.hits(plain):
            for literal in self._try(offset, number):
                self._seen[literal] += 1
                if self._seen[literal] == ENOUGH:
                    finder.drop(literal)
                    dropped_at = offset
            if not big:
                continue
            for gate in GATES:
                if gate in self._line:
                    often[gate] += 1
                    if often[gate] == OFTEN:
                        finder.replace(gate, [it for it in literals if gate in it and self._seen[it] < ENOUGH])
        if rest:
            for offset, _ in [*self._traces_first, *self._traces_last]:
                self._near(max(0, offset - NEAR), 2 * NEAR, rest)
            self._near(max(ENDS, size - ENDS), ENDS, rest)
        if dropped_at is not None:
            self._end(size, literals, dropped_at)

    def _near(self, start: int, length: int, literals: Sequence[bytes]) -> None:
        """Try the lines of one stretch for literals that no gate stands for. Which lines these are is not counted."""
        data = os.pread(self._fd, length, start)
        found: Set[int] = set()
        for literal in literals:
            at = data.find(literal)
            while at >= 0 and len(found) < 2 * ENOUGH:
                found.add(at)
                at = data.find(literal, at + 1)
        self._line_end = -1
        for at in sorted(found):
            self._try(start + at, 0)
        self._line_end = -1

    def _end(self, size: int, literals: List[bytes], after: int) -> None:
        """The log's end again, for the literals that there had been enough of."""
        start = max(size - END, after + 1)
        data = os.pread(self._fd, size - start, start)
        dropped = [literal for literal in literals if self._seen[literal] >= ENOUGH]
        found = set()
        for literal in dropped:
            at = data.rfind(literal)
            for _ in range(200):  # the last ones are what is wanted
                if at < 0:
                    break
                found.add(at)
                at = data.rfind(literal, 0, at)
        self._line_end = -1
        for at in sorted(found):
            self._try(start + at, 0)

    def _try(self, offset: int, number: int) -> List[bytes]:
        """Try the line around an offset, unless it has been; which literals it holds."""
        if offset < self._line_end:
            return []
        begin = max(0, offset - LONGEST)
        data = os.pread(self._fd, offset - begin + LONGEST, begin)
        at = offset - begin
        left = max(data.rfind(b"\n", 0, at), data.rfind(b"\r", 0, at)) + 1
        right = _line_end(data, at)
        self._line_end = begin + right
        line = self._line = data[left:right]
        held = [literal for literal in self._by_literal if literal in line]
        if TRACEBACK in held:
            text = line.decode("utf-8", "replace")
            self._note_traceback(begin + left, number, text.partition(TRACEBACK.decode())[0])
        rules = {rule.index: rule for literal in held for rule in self._by_literal[literal]}
        if rules:
            text = line.decode("utf-8", "replace")
            found = self._prefix.match(text)
            body = text[found.end() :] if found else text
            for index in sorted(rules):
                if rules[index].regex.search(body):
                    rules[index].keep(
                        {
                            "rule": index,
                            "offset": begin + left,
                            "line": number or None,
                            "text": text[:LONGEST],
                            "body": body[:LONGEST],
                            "after": begin + right,
                            "trace": self._latest.get(text[: len(text) - len(body)]),
                        }
                    )
        return held

    def _note_traceback(self, offset: int, number: int, prefix: str) -> None:
        if offset in self._noted:
            return  # seen already, in a stretch that was looked at by itself
        self._noted.add(offset)
        self._traces += 1
        if len(self._latest) < 4096 or prefix in self._latest:
            self._latest[prefix] = offset, number
        if len(self._traces_first) < TRACEBACKS:
            self._traces_first.append((offset, number))
        else:
            self._traces_last.append((offset, number))

    def _matches(self) -> List[Answer]:
        kept: Dict[Tuple[int, int], Answer] = {}
        for rule in self.rules:
            for match in [*rule.first, *rule.last]:
                kept[(match["offset"], rule.index)] = match
        found = [kept[key] for key in sorted(kept)]
        following: Dict[int, List[str]] = {}
        for match in found:
            end = match["after"]
            if end not in following:
                following[end] = self._following(end)
            match["after"] = following[end]
            trace = match.pop("trace")
            if trace is not None and match["offset"] - trace[0] < MOST:
                self._wanted[trace[0]] = trace[1]
        return found

    def _following(self, end: int) -> List[str]:
        data = os.pread(self._fd, FOLLOWING * OF_EACH, end)
        lines = re.split(r"\r?\n|\r", data.decode("utf-8", "replace"))[1 : FOLLOWING + 1]
        return [line[:OF_EACH] for line in lines]

    def _tracebacks(self) -> List[Answer]:
        """The first and last ones, and those that a kept match ends."""
        wanted = {**self._wanted, **dict(self._traces_first), **dict(self._traces_last)}
        out: List[Answer] = []
        end = -1
        prefixes: Dict[str, int] = {}
        for offset in sorted(wanted):
            found: Optional[Traceback] = read_traceback(self._fd, offset)
            if found is None or offset < prefixes.get(found.prefix, -1):
                continue  # part of the chain before
            prefixes[found.prefix] = found.end
            end = max(end, found.end)
            report = found.report()
            report["line"] = wanted[offset] or None
            report["after"] = self._following(found.end)
            out.append(report)
        return out


def _line_end(data: bytes, at: int) -> int:
    ends = [end for end in (data.find(b"\n", at), data.find(b"\r", at)) if end >= 0]
    return min(ends) if ends else len(data)


def scan(path: str, rules: Sequence[Dict[str, Any]], prefix: str, plain: bool = False) -> Answer:
    """See `Scan.run`. `plain` does without grep."""
    return Scan(path, rules, prefix).run(plain)
