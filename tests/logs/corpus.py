"""The corpus as tests and its report read it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.diagnosis import collect
from orchestrator.diagnosis.facts import Attention, Exit, Facts, Gpus, Metrics
from orchestrator.diagnosis.model import Verdict
from orchestrator.diagnosis.reading import kernel_lines
from orchestrator.diagnosis.rules import diagnose

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One log of the index."""

    file: str
    expect: str
    origin: str
    maker: str = ""
    source: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return HERE / self.file

    def verdict(self) -> Verdict:
        return diagnose(with_facts(collect.of_file(str(self.path)), self.facts))


def cases() -> list[Case]:
    return [Case(**row) for row in yaml.safe_load((HERE / "index.yaml").read_text())]


def with_facts(facts: Facts, more: Mapping[str, Any]) -> Facts:
    """A log's facts with those of the index beside them."""
    values = dict(more)
    for key, make in (("exit", Exit), ("attention", Attention), ("metrics", Metrics)):
        if key in values:
            values[key] = make(**values[key])
    if "kernel" in values:
        values["kernel"] = kernel_lines(values["kernel"], values.pop("boot", None))
    if "gpus" in values:
        values["gpus"] = Gpus(**{k: tuple(v) if isinstance(v, list) else v for k, v in values["gpus"].items()})
    return replace(facts, **values)


def confusion(results: Sequence[tuple[Case, str]]) -> str:
    """The matrix as Markdown: only cells that are not zero."""
    cells: dict[str, collections.Counter[str]] = {}
    for case, got in results:
        cells.setdefault(case.expect, collections.Counter())[got] += 1
    right = sum(1 for case, got in results if case.expect == got)
    made = sum(1 for case, _ in results if case.origin == "produced")
    lines = [
        "# Diagnosis: confusion over the corpus",
        "",
        "Written by `python -m tests.logs.report`; held true by `tests/unit/test_diagnosis_corpus.py`. A row is what a "
        "log has to be called, a column what it is called.",
        "",
        f"{right} of {len(results)} logs are called what they are; {made} of them ({made / len(results):.0%}) were "
        "produced by a script or in the lab, the others carry their public source or are written in a record's "
        "wording.",
        "",
        "| expected | logs | called |",
        "|---|---|---|",
    ]
    for expect in sorted(cells):
        called = ", ".join(f"{got} {count}" for got, count in sorted(cells[expect].items()))
        lines.append(f"| {expect} | {sum(cells[expect].values())} | {called} |")
    return "\n".join(lines) + "\n"
