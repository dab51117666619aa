"""Reads a command line that is not whole yet, and says what its last word can become."""

from __future__ import annotations

from orchestrator.completion.table import COMMANDS

Candidate = tuple[str, str]  # a word, and what it means
FILES = "file"  # the kind of word that the shell itself completes

Option = tuple[tuple[str, ...], "str | None", str]


class Line:
    """What the words before the last one say."""

    def __init__(self, words: list[str]) -> None:
        self.command: str | None = ""  # None: there is no such command
        self.given: dict[str, str] = {}  # values by what they are, such as place
        self.arguments = 0  # that are there
        self.used: set[str] = set()  # options
        self.waiting: str | None = None  # what the last option's value is
        self.ended = False  # by --: only arguments follow
        for word in words:
            self._take(word)

    def _take(self, word: str) -> None:
        if self.waiting is not None:
            self.given[self.waiting], self.waiting = word, None
        elif word == "--" and not self.ended:
            self.ended = True
        elif word.startswith("--") and not self.ended:
            name, equals, value = word.partition("=")
            self._option(name, value if equals else None)
        elif word.startswith("-") and len(word) > 1 and not self.ended:
            self._letters(word[1:])
        elif self.command is None or subcommands(self.command):
            path = f"{self.command or ''} {word}".strip()
            self.command = path if self.command is not None and path in COMMANDS else None
        else:
            kinds = COMMANDS[self.command][2]
            if self.arguments < len(kinds):
                self.given[kinds[self.arguments]] = word
            self.arguments += 1

    def _letters(self, letters: str) -> None:
        """-af, or -p with its value behind it."""
        for at, letter in enumerate(letters):
            kind = self.takes(f"-{letter}")
            if kind is not None:
                self._option(f"-{letter}", letters[at + 1 :] or None)
                return
            self._option(f"-{letter}", None)

    def _option(self, name: str, value: str | None) -> None:
        found = self._find(name)
        if found is None:
            return
        self.used.update(found[0])
        if found[1] is not None and value is None:
            self.waiting = found[1]
        elif found[1] is not None and value is not None:
            self.given[found[1]] = value

    def takes(self, name: str) -> str | None:
        """What the option's value is; None for a switch, or where there is no such option."""
        found = self._find(name)
        return None if found is None else found[1]

    def _find(self, name: str) -> Option | None:
        options = () if self.command is None else COMMANDS[self.command][1]
        return next((option for option in options if name in option[0]), None)


def subcommands(command: str) -> list[Candidate]:
    """The commands right below one."""
    start = f"{command} " if command else ""
    return [
        (path[len(start) :], entry[0])
        for path, entry in COMMANDS.items()
        if path and path.startswith(start) and " " not in path[len(start) :]
    ]


def complete(words: list[str], current: str) -> list[Candidate] | None:
    """What `current` can become after `words`, of which the first is the command's first argument; each begins with
    `current`. None: the name of a file."""
    line = Line(words)
    if line.command is None:
        return []
    if line.waiting is not None:
        return _values(line.waiting, current, line)
    if current.startswith("--") and "=" in current and not line.ended:
        name, _, value = current.partition("=")
        kind = line.takes(name)
        found = _values(kind, value, line) if kind else []
        return None if found is None else [(f"{name}={word}", help_) for word, help_ in found]
    if current.startswith("-") and not line.ended:
        return _options(line, current)
    below = subcommands(line.command)
    if below:
        return _beginning(below, current)
    kinds = COMMANDS[line.command][2]
    if line.arguments < len(kinds) and kinds[line.arguments]:
        found = _values(kinds[line.arguments], current, line)
        if found is None or found or current:
            return found
    return _options(line, "--") if not current and not line.ended else []


def _options(line: Line, current: str) -> list[Candidate]:
    assert line.command is not None
    found = []
    for names, kind, help_ in COMMANDS[line.command][1]:
        if kind == "set" or not line.used.intersection(names):
            found += [(name, help_) for name in names if name.startswith("--") or current == name]
    return _beginning(found, current)


def _values(kind: str, current: str, line: Line) -> list[Candidate] | None:
    if kind == FILES:
        return None
    if "|" in kind:
        return _beginning([(word, "") for word in kind.split("|")], current)
    from orchestrator.completion.values import values

    return _beginning(values(kind, current, line.given), current)


def _beginning(found: list[Candidate], current: str) -> list[Candidate]:
    return [one for one in found if one[0].startswith(current)]
