"""`python -m tests.logs.report` writes docs/diagnosis-confusion.md."""

from __future__ import annotations

from pathlib import Path

from tests.logs import corpus

TARGET = Path(__file__).parents[2] / "docs" / "diagnosis-confusion.md"


def main() -> None:
    results = [(case, case.verdict().cause) for case in corpus.cases()]
    TARGET.write_text(corpus.confusion(results))
    for case, got in results:
        if got != case.expect:
            print(f"{case.file}: {got}, expected {case.expect}")


if __name__ == "__main__":
    main()
