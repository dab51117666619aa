"""`orch launch` and `orch plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.config import load_recipe
from orchestrator.errors import Unreachable, UsageError
from orchestrator.explain import explanation
from orchestrator.launch import Launch
from orchestrator.records import warming
from orchestrator.run import BEFORE_TRAINING, RunStatus
from orchestrator.schema_files import refresh
from orchestrator.several import carry_out, launches
from orchestrator.watch import Interrupted, Observed, follow

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.plan import LaunchPlan
    from orchestrator.timing import Timed

_LAST_ENDS = 30.0  # seconds

_LOG_KEPT = 256 * 1024  # bytes, for the last lines


class _Silent:
    """A report for `--json`: the object at the end says it all."""

    def begin(self, step: str) -> None: ...

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None: ...

    def note(self, step: str, what: str) -> None: ...

    def end(self, step: str, what: str) -> None: ...


def _asked(
    recipe: str,
    place: str | None,
    overrides: list[str],
    report: Any,
    *,
    new: bool = False,
    latest: bool = False,
    share_gpus: bool = False,
    why: str = "",
    warm: bool = False,
) -> list[Launch]:
    """A launch for each of the recipe's places."""
    project, hosts = project_and_hosts()
    refresh(project)
    loaded = load_recipe(project, recipe, place_override=place, overrides=overrides)
    if warm:
        loaded = warming(loaded)
    return launches(project, hosts, loaded, report, new=new, latest=latest, share_gpus=share_gpus, why=why, warm=warm)


def _planned(asked: list[Launch]) -> LaunchPlan:
    from orchestrator.expect import with_times
    from orchestrator.history import step_times
    from orchestrator.plan import plan

    try:
        return with_times(plan(asked), step_times())
    finally:
        _close(asked)


def _close(asked: list[Launch]) -> None:
    for launch in asked:
        launch.close()


def _names(asked: list[Launch]) -> str:
    return ", ".join(launch.place.name for launch in asked)


def plan_command(recipe: str, place: str | None, overrides: list[str], *, json: bool, new: bool = False) -> None:
    """Print what a launch would do."""
    plan = _planned(_asked(recipe, place, overrides, _Silent(), new=new))
    if json:
        print_json(plan.to_json())
        return
    from orchestrator.view.plan import print_plan

    print_plan(console(), plan)


def launch_command(
    recipe: str,
    place: str | None,
    overrides: list[str],
    *,
    detach: bool,
    new: bool,
    latest: bool,
    why: str,
    explain: bool,
    json: bool,
    warm: bool = False,
    share_gpus: bool = False,
) -> None:
    """Launch, then follow to the end unless detached.

    Raises:
        typer.Exit: 1 when the run failed, was stopped or is lost.
    """
    if explain:
        _explain(recipe, place, overrides, new=new, latest=latest, warm=warm, share_gpus=share_gpus)
        return
    if json and not detach:
        raise UsageError("--json goes with --detach: to follow a run as JSON, ask orch status --json")
    from orchestrator.timing import Timed
    from orchestrator.view.follow import LaunchDisplay

    out = console()
    with LaunchDisplay(out) as display:
        report = Timed(_Silent() if json else display)
        display.expected = report.expected
        more = {"new": new, "latest": latest, "warm": warm, "share_gpus": share_gpus}
        asked = _asked(recipe, place, overrides, report, why=why, **more)
        launch, names = asked[0], _names(asked)
        report.launches = asked
        try:
            if not json:
                out.print(f"{'warming' if warm else 'launching'} {launch.recipe.name} at {names}", soft_wrap=True)
            asked = report.launches = list(carry_out(asked, report))
            launch, names = asked[0], _names(asked)
        except BaseException as error:
            _close(asked)
            if isinstance(error, KeyboardInterrupt) and not json:
                out.print("interrupted; the same command goes on from here", soft_wrap=True)
            raise
        finally:
            report.keep()
    try:
        if json:
            phase = str(launch.state.get("phase"))
            places = {"places": [one.place.name for one in asked]} if len(asked) > 1 else {}
            print_json({"run": launch.run, "place": launch.place.name, **places, "how": launch.how, "phase": phase})
        elif launch.how == "running" and launch.state.get("phase") not in BEFORE_TRAINING:
            _say(out, f"{launch.run} is training already, so nothing was started", launch.run)
        elif detach:
            _say(out, f"{launch.run} runs at {names}", launch.run)
        else:
            raise typer.Exit(_follow(out, asked, report))
    finally:
        _close(asked)


def _say(out: Console, what: str, run: str) -> None:
    out.print(what, soft_wrap=True)
    out.print(f"  orch status {run}\n  orch logs -f {run}\n  orch attach {run}\n  orch stop {run}", soft_wrap=True)


def _explain(
    recipe: str,
    place: str | None,
    overrides: list[str],
    *,
    new: bool,
    latest: bool,
    warm: bool = False,
    share_gpus: bool = False,
) -> None:
    from orchestrator.view.plan import print_plan

    asked = _asked(recipe, place, overrides, _Silent(), new=new, latest=latest, warm=warm, share_gpus=share_gpus)
    plan = _planned(asked)
    for launch in asked:
        print(explanation(launch.place, plan.requests))
    print_plan(console(), plan)
    each = " to each place" if len(asked) > 1 else ""
    print(f"To know this, facts were read over one connection{each}. Nothing was started or changed.")


def _follow(out: Console, asked: list[Launch], timed: Timed) -> int:
    """To the run's end: the first of several places is followed, where rank 0 is."""
    from orchestrator.cli.diagnose import show_bad_end
    from orchestrator.view.follow import FollowDisplay, summary

    launch = asked[0]
    last: RunStatus | None = None
    tail = b""
    try:
        steps = None if launch.warm else _total_steps(launch.recipe.settings)
        first = None if launch.warm else timed.expected_first_step()
        with FollowDisplay(out, steps, first) as display:
            for event in follow(launch.place, launch.run, session=launch.session, wait=1.0):
                if isinstance(event, Interrupted):
                    display.interrupted(event.reason, event.seconds)
                    continue
                timed.first_step(last, event.status)
                last = event.status
                tail = (tail + last.log)[-_LOG_KEPT:]
                display.observed(last)
    except KeyboardInterrupt:
        _say(out, f"left {launch.run}, which goes on at {_names(asked)}", launch.run)
        return 130
    assert last is not None
    summary(out, last, tail)
    phases = {last.phase, *_ended(out, asked[1:])}
    bad = next((phase for phase in ("failed", "lost") if phase in phases), last.phase)
    show_bad_end(out, [one.place for one in asked], launch.run, bad, launch.session)
    out.print(f"  orch logs {launch.run}", soft_wrap=True)
    return 0 if phases == {"finished"} else 1


def _ended(out: Console, others: list[Launch]) -> list[str]:
    """How the run ended at its other places; their ends come within seconds of the first place's."""
    phases = []
    for launch in others:
        try:
            phase = ""
            for event in follow(launch.place, launch.run, tail_lines=0, give_up_after=_LAST_ENDS):
                if isinstance(event, Observed):
                    if not phase and not event.status.has_ended:
                        out.print(f"waiting for its end at {launch.place.name}", soft_wrap=True)
                    phase = event.status.phase
            phases.append(phase)
        except Unreachable as error:
            out.print(f"at {launch.place.name}: unknown, {error.message}", soft_wrap=True)
            phases.append("unknown")
        else:
            out.print(f"at {launch.place.name}: {phases[-1]}", soft_wrap=True)
    return phases


def _total_steps(settings: dict[str, Any]) -> int | None:
    """How many steps the bundled trainer will take, where its settings say so."""
    steps = settings.get("steps") or (settings.get("train") or {}).get("steps")
    return steps if isinstance(steps, int) else None
