"""The plan as text."""

from pathlib import Path
from typing import Any

from trainer.plan_work import CARDS

GIB, WORTH = 1 << 30, 0.01  # changes that give less are not shown
KINDS = {
    "target": "target",
    "weights": "weights",
    "masters": "float32 masters",
    "optimizer": "optimizer",
    "average": "moving average",
    "gradients": "gradients",
    "features": "features",
    "activations": "activations",
    "head": "head",
}


def text(found: dict[str, Any], asked: Any, config: Path) -> str:
    lines = [f"plan of {found['name']}"]
    if not found["flex"]:
        lines.append("of flex attention: the scores that `attention: dense` builds are in none of these figures")
    for drafter in found["drafters"]:
        lines += _drafter(drafter)
    lines += _target(found["target"])
    lines += _step(found)
    lines += _fit(found, asked, config)
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def _flop(count: float) -> str:
    return f"{count / 1e12:,.4g} TFLOP" if count >= 1e11 else f"{count / 1e9:,.4g} GFLOP"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{1e3 * value:,.0f} ms"


def _memory(memory: dict[str, Any], name: str) -> list[str]:
    parts = sorted(memory["by"].items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{KINDS[kind]} {_gib(size)}" for kind, size in parts if size >= memory["peak"] / 200)
    return [f"  peak memory of {name}: {_gib(memory['peak'])}, in the phase {memory['when']!r}: {listed}"]


def _drafter(drafter: dict[str, Any]) -> list[str]:
    flops, took = drafter["flops"], drafter["seconds"]
    spans = "; ".join(f"{span} {_flop(flops[span])}, {_ms(took[span])}" for span in flops)
    shared = f"each of {drafter['ranks']} ranks holds " + ("its rows" if drafter["sharded"] else "all of it")
    return [
        f"{drafter['name']}: {drafter['parameters'] / 1e6:,.2f} M parameters"
        + (f", {shared}" if drafter["ranks"] > 1 else ""),
        f"  a step of a rank, {drafter['parts']} part(s): {_flop(sum(flops.values()))}",
        f"  {spans}; optimizer {_ms(took['optimizer'])}",
        *_memory(drafter["memory"], "a rank"),
        f"  a checkpoint: {drafter['checkpoint'] / 1e9:.3f} GB on disk, and as much pinned memory of the host",
    ]


def _target(target: dict[str, Any]) -> list[str]:
    size = "of unknown size" if target["parameters"] is None else f"{target['parameters'] / 1e6:,.2f} M parameters"
    lines = [
        f"target: {target['model']}, {size}; {target['layers_run']} layers run, {_flop(target['flops_a_part'])} "
        f"a part, {_ms(target['seconds_a_part'])}"
    ]
    return lines + (_memory(target["memory"], "a target rank") if target["memory"] else [])


def _step(found: dict[str, Any]) -> list[str]:
    step, features = found["step"], found["features"]
    lines = [f"documents of {found['documents']:,} tokens (--documents says otherwise)"]
    if step["seconds"] is None:
        known = ", ".join(card.name for card in CARDS)
        why = "no measured rate" if found["rates"] is None else "no measured rate of a part of it"
        lines.append(f"a step takes: unknown, {why} (measured: bfloat16 with AdamW on {known})")
    else:
        rate = step["tokens"] / step["seconds"]
        lines.append(
            f"a step takes {_ms(step['seconds'])}: drafter {_ms(step['drafter_seconds'])}, target "
            f"{_ms(step['target_seconds'])}, {step['how']}; {rate:,.0f} tokens/s; the run "
            f"{step['run_seconds'] / 3600:,.1f} h of steps"
        )
    if found["rates"]:
        lines.append(f"rates: {found['rates']}")
    lines.append(f"features: {features['part'] / 1e9:.3f} GB a part")
    if features["travels"]:
        second = "unknown" if features["second"] is None else f"{features['second'] / 1e9:.2f} GB/s"
        lines[-1] += f"; {features['step'] / 1e9:.3f} GB a step between ranks, {second}"
    return lines


def _fit(found: dict[str, Any], asked: Any, config: Path) -> list[str]:
    card = found["card"]
    lines = []
    if found["chosen"] and card:
        chosen = found["chosen"]["set"]
        if chosen:
            lines.append(f"chosen: {' '.join(f'--set {each}' for each in chosen)}; the figures above are with them")
        else:
            lines.append(
                "chosen: what the file says" if chosen is not None else "chosen: nothing, no such settings fit"
            )
    if card is None:
        name = f"{asked.gpu} is not known here" if asked.gpu else "no GPU here"
        what = "whether it fits, and what to choose" if asked.choose else "whether it fits"
        return [*lines, f"{what}: unknown, {name}; say --gpu-memory GIB"]
    what = f"{card['name'] or 'the card'}, {_gib(card['memory'])}"
    if found["fits"] is None:
        why = "the target's size is" if found["flex"] else "dense attention's scores are not counted"
        return [*lines, f"whether it fits {what}: unknown, since {why}"]
    need = f"{_gib(found['needed'])} with an allowance for the CUDA context and fragments"
    if found["fits"]:
        return [*lines, f"fits: {need}, of {what}"]
    lines.append(f"does NOT fit: {need}, of {what}. What would take less, by itself:")
    worth = [change for change in found["changes"] if change["gain"] >= WORTH * GIB]
    for change in worth:
        same = "" if change["same"] else ", and is another training"
        lines.append(f"  {change['gain'] / GIB:7.2f} GiB  --set {change['setting']}  ({change['costs']}{same})")
    again = " ".join(["python -m trainer plan", str(config), *asked.again])
    if found["chosen"] is None:
        lines.append(f"next: {again} --choose")
    elif worth:
        lines.append(f"next, until it fits: {again} --set {worth[0].get('setting')}")
    return lines
