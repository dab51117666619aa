"""Training that runs, but wrongly: its figures, its speed, its silence."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line, raised
from orchestrator.diagnosis.model import Cause

CAUSES = (
    Cause(
        "nan-loss",
        "the loss is not a number",
        "training",
        (
            raised(
                "FloatingPointError|ValueError|RuntimeError|AssertionError|TrainerError|Exception",
                "nan",
                "NaN",
                "not finite",
                "non-finite",
                literals=("loss is nan", "Loss is nan", "NaN", "not finite", "non-finite", "loss is NaN", "nan values"),
                after=r"(?i)loss|grad|nan",
            ),
            line(("Loss is nan", "Loss is NaN", "loss is nan", "loss is NaN"), r"(?i)loss is nan"),
            line(("returned nan values", "nan values"), r"returned nan values in its \d+th output"),
            line(("the loss is inf", "the loss is -inf"), r"^error: the loss is -?inf at step"),
        ),
        (
            "Go back to a checkpoint before it. Usual ways out: a lower rate, a longer warm-up, clipping, bf16 in "
            "place of fp16, a look at the batch of that step.",
        ),
        "orch logs {run} | grep -n -i -m1 nan",
        structured=("nan_metrics",),
        precedence=73,
    ),
    Cause(
        "loss-diverged",
        "the loss has run away",
        "training",
        (line(("diverged", "Diverged"), r"(?i)\b(?:loss|training) (?:has )?diverged"),),
        ("Go back to a checkpoint before it rose, with a lower rate or a longer warm-up.",),
        structured=("loss_ran_away",),
        precedence=48,
    ),
    Cause(
        "hang",
        "it does nothing: no step for a long time, and the GPUs are idle",
        "training",
        (),
        (
            "Have a look at where every thread stands. A rank that waits in a collective waits for one that is "
            "elsewhere.",
        ),
        "orch diagnose {run} --stacks",
        structured=("no_step_and_idle",),
        precedence=40,
    ),
    Cause(
        "throughput-regression",
        "it trains, but slower than it should",
        "training",
        (),
        (
            "Compare with the last good run: environment, compile cache, batch, other programs on the cards, "
            "temperature and power limit. Attention that fell back to dense is slow too.",
        ),
        "orch status {run}",
        structured=("slow",),
        precedence=35,
    ),
)
