"""What a finished run leaves, `result.json`; and figures as text, in lines of at most 80 columns."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.verify import MATCH, REJECTION

if TYPE_CHECKING:
    from trainer.evaluate import Evaluator

WIDTH = 80
RULES = {
    MATCH: "drafts are the drafter's argmax; a draft is accepted if it equals the target's token",
    REJECTION: "drafts are sampled; a draft x is accepted with probability min(1, p(x) / q(x))",
}
BASELINE = "n-gram: longest-suffix prompt lookup, backing off to 4-gram … unigram counts of the training rows"


def result_of(
    config: Config,
    evaluator: "Evaluator",
    start: dict[str, Any],
    end: dict[str, Any],
    baseline: dict[str, Any],
    *,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """`start`, `end` and `baseline` are whole evaluations, compared with plain decoding."""
    measured = {"start": start, "end": end, "ngram": baseline}
    return {
        "name": config.name,
        "seed": config.seed,
        "steps": steps,
        "seconds": round(seconds, 2),
        "headline": {
            "name": end["headline"]["name"],
            "repeat_8gram_share": end["headline"]["repeat_8gram_share"],
            **{which: evaluation[end["headline"]["name"]]["tau"] for which, evaluation in measured.items()},
        },
        "equal_to_plain": {**equality_of(measured), "smallest_margin": evaluator.margin},
        **measured,
        "rule": RULES[MATCH],
        "rules": RULES,
        "baseline": BASELINE,
    }


def equality_of(measured: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Over some evaluations of the same prompts: by temperature the least number of equal texts, and what differed.

    `within_rounding` is what a run is held to: no text left plain decoding's where that led by the bound or more.
    """
    some = next(iter(measured.values()))
    names = [name for name in some if name.startswith("temperature_")]
    equal = {name: min(evaluation[name]["equal_to_plain"] for evaluation in measured.values()) for name in names}
    differing = [evaluation[name]["divergences"] for evaluation in measured.values() for name in names]
    gaps = [found["largest_gap"] for found in differing]
    return {
        "prompts": some["prompts"],
        **equal,
        "all": all(count == some["prompts"] for count in equal.values()),
        "texts": len(differing) * some["prompts"],
        "divergences": sum(found["count"] for found in differing),
        "largest_gap": None if None in gaps else max(gaps),  # null: a text was cut off elsewhere
        "bound": differing[0]["bound"],
        "within_rounding": not any(found["real"] for found in differing),
    }


def equality_line(equal: dict[str, Any]) -> str:
    count, of = equal["divergences"], equal["texts"]
    if not count:
        return f"All {of} texts equal plain decoding."
    gap = "that ends elsewhere" if equal["largest_gap"] is None else f"at a gap of {equal['largest_gap']:.2g} logits"
    verdict = "within rounding" if equal["within_rounding"] else "NOT rounding: something is wrong"
    return _wrapped(
        f"{count} of {of} texts leave plain decoding, one {gap}, {verdict} (below {equal['bound']:g} counts as such)."
    )


def summary(result: dict[str, Any]) -> str:
    """A table of tau by temperature, and what it is worth."""
    columns = ("before", "after", "n-gram", "repeated", "equal to plain", "speed-up")
    head = f"{'':18}" + "".join(f"{column:>{width}}" for column, width in zip(columns, _WIDTHS, strict=True))
    lines = [f"tau after {result['steps']} steps, {result['seconds']:.0f} s, seed {result['seed']}", head]
    end, prompts = result["end"], result["equal_to_plain"]["prompts"]
    names = [name for name in end if "temperature_" in name]
    for name in names:
        label = _label(name) + (" *" if name == result["headline"]["name"] else "")
        taus = [f"{result[which][name]['tau']:.3f}" for which in ("start", "end", "ngram")]
        equal = f"{result['equal_to_plain'][name]} of {prompts}" if name in result["equal_to_plain"] else ""
        cells = [*taus, f"{end[name]['repeat_8gram_share']:.1%}", equal, _times(end[name]["speedup"])]
        lines.append(f"{label:18}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)))
    lines += position_lines(end, names)
    lines.append(_wrapped(f"* the headline: its text repeats least. {_rules(names)}"))
    if result["equal_to_plain"]["divergences"]:
        lines.append(equality_line(result["equal_to_plain"]))
    return "\n".join(lines)


_WIDTHS = (8, 8, 8, 10, 16, 10)


def evaluation(figures: dict[str, Any], name: str, *, positions: bool = True) -> str:
    """Tables of one evaluation: tau by temperature and rule, by position, by domain."""
    names = [key for key in figures if "temperature_" in key]
    lines = [
        f"{name}: tau by temperature and verify rule, {figures['prompts']} prompts, "
        f"{figures['batch']} at a time, {figures['device']}, {figures['dtype']}"
    ]
    lines = [_wrapped(lines[0])]
    lines.append(f"{'':22}{'tau':>8}{'repeated':>10}{'equal':>8}{'tokens/s':>11}{'plain':>11}{'speed-up':>10}")
    for key in names:
        row = figures[key]
        lines.append(
            f"{_label(key):22}{row['tau']:8.3f}{row['repeat_8gram_share']:10.1%}{row.get('equal_to_plain', ''):>8}"
            f"{_rate(row['tokens_per_second']):>11}{_rate(row['plain_tokens_per_second']):>11}"
            f"{_times(row['speedup']):>10}"
        )
    if positions:
        lines += position_lines(figures, names)
        lines += domain_lines(figures, names)
        lines.append(_wrapped(_rules(names)))
    return "\n".join(lines)


def position_lines(figures: dict[str, Any], names: list[str], columns: int = 8) -> list[str]:
    """Shares of rounds whose draft at a position was accepted, so many positions a line."""
    size = len(figures[names[0]]["accepted_share"])
    lines = ["accepted, by position in the block: of all rounds; of those that came so far"]
    for begin in range(0, size, columns):
        places = range(begin, min(begin + columns, size))
        lines.append(f"{'':22}" + "".join(f"{place + 1:7}" for place in places))
        for name in names:
            for key, label in (("accepted_share", _label(name)), ("accepted_given_previous", "")):
                lines.append(f"{label:22}" + "".join(_percent(figures[name][key][place]) for place in places))
    return lines


def domain_lines(figures: dict[str, Any], names: list[str]) -> list[str]:
    """None where prompts have no domains. Columns stand for the rows of the table above, in its order."""
    if "domains" not in figures[names[0]]:
        return []
    lines = [f"{'tau by domain':24}{'prompts':>8}" + "".join(f"{_short(name):>16}" for name in names)]
    for domain, row in figures[names[0]]["domains"].items():
        taus = [figures[name]["domains"][domain]["tau"] for name in names]
        label = domain or "(none)"
        label = label if len(label) <= 23 else label[:22] + "…"
        cells = "".join(f"{'-' if tau is None else f'{tau:.3f}':>16}" for tau in taus)
        lines.append(f"{label:24}{row['prompts']:8}{cells}")
    return lines


def _label(name: str) -> str:
    """temperature_0.7 -> "temperature 0.7", rejection_temperature_0.7 -> "rejection 0.7"."""
    return name.replace("_temperature", "").replace("_", " ")


def _short(name: str) -> str:
    return _label(name).replace("temperature", "temp.")


def _rules(names: list[str]) -> str:
    rules = f"{RULES[MATCH][0].upper()}{RULES[MATCH][1:]}."
    if any(name.startswith(REJECTION) for name in names):
        rules += f" By {REJECTION}, {RULES[REJECTION]}."
    return rules


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _percent(share: float | None) -> str:
    return f"{'-':>7}" if share is None else f"{share:7.1%}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"
