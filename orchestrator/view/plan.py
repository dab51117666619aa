"""A launch's plan for people."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.compile_cache.words import took
from orchestrator.plain import plain
from orchestrator.plan import LaunchPlan, PlannedStep
from orchestrator.view.text import size

_MOMENT = 1.0  # seconds: what is expected to be shorter counts in the sum alone


def print_plan(console: Console, plan: LaunchPlan) -> None:
    """One line a step, with bytes and expected time; then their sums."""
    console.print(f"launching {plan.recipe} at {plan.place} would:", soft_wrap=True)
    for number, step in enumerate(plan.steps, start=1):
        line = Text(f"  {number}. {step.name:<12} {plain(step.what)}")
        if step.bytes:
            line.append(f"  [{size(step.bytes)}{' and more' if step.more else ''}]")
        if told := _time(step):
            line.append(f"  ({told})", style="dim")
        console.print(line, soft_wrap=True)
        if step.how == "refused":
            console.print(f"  and end there: nothing would be started at {plan.place}", soft_wrap=True)
            return
    least = "at least " if plan.more else ""
    console.print(f"  stream {least}{plan.bytes:,} bytes ({size(plan.bytes)}) to {plan.place}", soft_wrap=True)
    console.print(f"  {_sum(plan)}", soft_wrap=True)


def _time(step: PlannedStep) -> str:
    if step.seconds is None:
        return "time not known yet" if step.bytes or step.how == "built" else ""
    return f"about {took(step.seconds)}, {step.why}" if step.seconds >= _MOMENT else ""


def _sum(plan: LaunchPlan) -> str:
    unknown = [step.name for step in plan.steps if step.seconds is None]
    if len(unknown) == len(plan.steps):
        return f"how long that takes is not known yet: nothing like it was launched from here to {plan.place}"
    known = sum(step.seconds for step in plan.steps if step.seconds is not None)
    text = f"take about {took(known)}"
    if unknown:
        text += f", and what is not known yet: {', '.join(unknown)}"
    if plan.first_step is not None:
        text += f"; first step about {took(plan.first_step.seconds)} after the start, {plan.first_step.why}"
    return text
