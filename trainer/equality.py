"""Is the text of speculative decoding that of plain decoding?

Each is the target's own choice, token by token, but the logits are computed in batches of other shapes and so rounded
otherwise. Where two tokens lead all others and nearly tie, rounding may decide, and from there on the texts differ for
good. So the first difference of a text is looked up, with the lead that plain decoding's token had there: a small one
is rounding, a large one is a fault in a cache, a position or a mask.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from trainer.decode import Decoded

# Largest lead, in logits, that rounding may overturn. In float64 even an exact tie breaks alike. In float32 logits of
# the size of 30 are off by some 1e-5. bfloat16 has steps of 0.125 there, and both tokens may be off by a step or two.
BOUNDS = {torch.float64: 0.0, torch.float32: 1e-3, torch.bfloat16: 0.5}
LISTED = 5  # divergences that a report spells out: those with the largest gaps


@dataclass(frozen=True, kw_only=True)
class Divergence:
    prompt: int
    position: int  # in the generated text
    gap: float  # lead of plain decoding's token over its next best, in logits, noise included

    def real(self, dtype: torch.dtype) -> bool:
        """Beyond rounding in the target's `dtype`."""
        return self.gap >= BOUNDS[dtype]


def divergences(plain: Decoded, drafted: Decoded) -> list[Divergence]:
    """The first of every prompt whose texts differ. A text that only ends earlier was cut wrongly: an infinite gap."""
    found = []
    for prompt, (text, other) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)):
        if text == other:
            continue
        pairs = zip(text, other, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            found.append(Divergence(prompt=prompt, position=min(len(text), len(other)), gap=math.inf))
        else:
            found.append(Divergence(prompt=prompt, position=place, gap=plain.gaps[prompt][place]))
    return found


def summary(found: list[Divergence], dtype: torch.dtype) -> dict[str, Any]:
    """For a report; JSON has no infinity, so a gap without a bound is null."""
    worst = sorted(found, key=lambda divergence: -divergence.gap)[:LISTED]
    return {
        "count": len(found),
        "real": sum(divergence.real(dtype) for divergence in found),
        "bound": BOUNDS[dtype],
        "largest_gap": _finite(worst[0].gap) if worst else 0.0,
        "largest": [{"prompt": d.prompt, "position": d.position, "gap": _finite(d.gap)} for d in worst],
    }


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None
