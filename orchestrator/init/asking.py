"""Questions, each of which an option answers as well: without a terminal none is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.config.words import did_you_mean, quote
from orchestrator.errors import UsageError


@dataclass(frozen=True)
class Answer:
    """One that can be chosen: its value, how it is shown, and what stands beside it."""

    value: str
    shown: str
    beside: str = ""


@dataclass(frozen=True)
class Asker:
    """Who answers. `read` asks with a prompt and gives a line, `show` puts text on the screen.

    `command` is the command so far; with an option more it answers a question by itself.
    """

    read: Callable[[str], str]
    show: Callable[[str], None]
    terminal: bool
    yes: bool  # every question has its default, and none is asked
    command: str = "orch init"

    def choose(
        self,
        question: str,
        answers: Sequence[Answer],
        default: int | None,
        option: str,
        *,
        free: str,
        numbers: bool = False,
    ) -> str:
        """One of the answers, by its number or its name, or what `free` describes. `default`: an index; `numbers`:
        other numbers than those of the answers may be meant.

        Raises UsageError where nobody can be asked, naming the option (with an answer, as it would be typed).
        """
        if not self.terminal or self.yes:
            return self._unasked(question, answers[default].value if default is not None else None, answers, option)
        self.show(f"{question}?")
        width = max((len(one.shown) for one in answers), default=0)
        for number, one in enumerate(answers, 1):
            self.show(f"  {number:>2}  {one.shown.ljust(width)}  {one.beside}".rstrip())
        while True:
            said = self._line(
                f"number, {free}" if answers else free, answers[default].shown if default is not None else ""
            )
            if not said and default is not None:
                return answers[default].value
            by_name = [one.value for one in answers if said in (one.value, one.shown)]
            if by_name:
                return by_name[0]
            if said.isdigit() and 1 <= int(said) <= len(answers):
                return answers[int(said) - 1].value
            if said and (numbers or not said.isdigit()):
                return said
            self.show(f"there is no {said}" if said else "one has to be chosen")

    def text(self, question: str, default: str, option: str) -> str:
        """A line of text. Raises UsageError where nobody can be asked and there is no default."""
        if not self.terminal or self.yes:
            return self._unasked(question, default or None, (), option)
        while True:
            said = self._line(question, default)
            if said or default:
                return said or default

    def sure(self, question: str, option: str, *, default: bool) -> bool:
        """Yes or no."""
        if not self.terminal or self.yes:
            return self._unasked(question, "y" if default else "n", (), option) == "y"
        while True:
            said = self._line(f"{question} [{'Y/n' if default else 'y/N'}]", "").lower()
            if said in ("", "y", "yes", "n", "no"):
                return default if not said else said[0] == "y"

    def _unasked(self, question: str, default: str | None, answers: Sequence[Answer], option: str) -> str:
        if self.yes and default is not None:
            return default
        some = ", ".join(one.value for one in answers[:8])
        known = f" Answers are: {some}." if some else ""
        why = "--yes does not choose among several" if self.yes else "cannot be asked, since stdin is no terminal"
        more = ", or --yes for what orch would choose" if default is not None else ""
        raise UsageError(f'"{question}?" {why}.{known}', f"{self.command} {option}{more}")

    def _line(self, prompt: str, default: str) -> str:
        try:
            return self.read(f"{prompt}{f' [{default}]' if default else ''}: ").strip()
        except EOFError:
            raise UsageError(
                "the input ended before all was answered; nothing was written", "orch init --help"
            ) from None


def no_such(what: str, name: str, known: Sequence[str], hint: str) -> UsageError:
    """The sentence for a name that is not there."""
    return UsageError(f"there is no {what} {quote(name)}{did_you_mean(name, known)}", hint)
