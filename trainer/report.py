"""What a finished run leaves: `result.json`, and a short table."""

from typing import Any

from trainer.config import Config

VERIFY_RULE = "drafts are the drafter's argmax; a draft is accepted if it equals the target's token"
BASELINE = "n-gram: longest-suffix prompt lookup, backing off to 4-gram … unigram counts of the training rows"


def result_of(
    config: Config,
    start: dict[str, Any],
    end: dict[str, Any],
    baseline: dict[str, Any],
    *,
    steps: int,
    seconds: float,
    margin: float,
) -> dict[str, Any]:
    names = [name for name in end if name.startswith("temperature_")]
    measured = {"start": start, "end": end, "ngram": baseline}
    equal = {name: min(evaluation[name]["equal_to_plain"] for evaluation in measured.values()) for name in names}
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
        "equal_to_plain": {
            "prompts": end["prompts"],
            **equal,
            "all": all(count == end["prompts"] for count in equal.values()),
            "smallest_margin": margin,
        },
        **measured,
        "rule": VERIFY_RULE,
        "baseline": BASELINE,
    }


def summary(result: dict[str, Any]) -> str:
    """A table of tau by temperature, and what it is worth."""
    head = f"{'':18}{'before':>8}{'after':>8}{'n-gram':>8}{'repeated':>10}{'equal to plain':>16}"
    lines = [f"tau after {result['steps']} steps, {result['seconds']:.0f} s, seed {result['seed']}", head]
    prompts = result["equal_to_plain"]["prompts"]
    for name in (name for name in result["end"] if name.startswith("temperature_")):
        mark = " *" if name == result["headline"]["name"] else ""
        taus = "".join(f"{result[which][name]['tau']:8.3f}" for which in ("start", "end", "ngram"))
        share, equal = result["end"][name]["repeat_8gram_share"], result["equal_to_plain"][name]
        lines.append(f"{name.replace('_', ' ') + mark:18}{taus}{share:10.1%}{f'{equal} of {prompts}':>16}")
    lines.append(f"* the headline: its text repeats least. {result['rule'][0].upper()}{result['rule'][1:]}.")
    return "\n".join(lines)
