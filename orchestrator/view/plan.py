"""A launch's plan for people."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.plain import plain
from orchestrator.plan import LaunchPlan
from orchestrator.view.text import size


def print_plan(console: Console, plan: LaunchPlan) -> None:
    """One line a step, then the sum of the bytes."""
    console.print(f"launching {plan.recipe} at {plan.place} would:", soft_wrap=True)
    for number, step in enumerate(plan.steps, start=1):
        amount = f"  [{size(step.bytes)}]" if step.bytes else ""
        console.print(Text(f"  {number}. {step.name:<12} {plain(step.what)}{amount}"), soft_wrap=True)
    console.print(f"  stream {plan.bytes:,} bytes ({size(plan.bytes)}) to {plan.place}", soft_wrap=True)
