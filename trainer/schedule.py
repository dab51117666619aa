"""Learning-rate schedules: pure functions from the step to a share of the rate."""

import math

from trainer.config import OptimizerConfig


def factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """For step 0 … steps-1: rises over the first `warmup` share of the steps, then
    wsd (warm-up, stable, decay): stays, and falls linearly to `final` over the last `decay` share;
    cosine: follows half a cosine down to `final`."""
    warmup = config.warmup * steps
    rise = (step + 1) / max(1.0, warmup)
    if config.schedule == "cosine":
        done = min(1.0, max(0.0, (step - warmup) / max(1.0, steps - warmup)))
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = min(1.0, (steps - step) / max(1.0, config.decay * steps))
    return min(rise, config.final + (1 - config.final) * shape)
