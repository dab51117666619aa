"""`orch launch` and `orch plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.config import load_recipe, resolve_place
from orchestrator.errors import UsageError
from orchestrator.explain import explanation
from orchestrator.launch import Launch, carry_out
from orchestrator.run import BEFORE_TRAINING, RunStatus
from orchestrator.watch import Interrupted, follow

if TYPE_CHECKING:
    from rich.console import Console


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
    why: str = "",
) -> Launch:
    project, hosts = project_and_hosts()
    loaded = load_recipe(project, recipe, place_override=place, overrides=overrides)
    found = resolve_place(hosts, loaded.place, project)
    return Launch(project=project, recipe=loaded, place=found, report=report, new=new, latest=latest, why=why)


def plan_command(recipe: str, place: str | None, overrides: list[str], *, json: bool, new: bool = False) -> None:
    """Print what a launch would do."""
    from orchestrator.plan import plan_launch

    launch = _asked(recipe, place, overrides, _Silent(), new=new)
    try:
        plan = plan_launch(launch)
    finally:
        launch.close()
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
) -> None:
    """Launch, then follow to the end unless detached.

    Raises:
        typer.Exit: 1 when the run failed, was stopped or is lost.
    """
    if explain:
        _explain(recipe, place, overrides, new=new, latest=latest)
        return
    if json and not detach:
        raise UsageError("launch --json goes with --detach: to follow a run as JSON, ask orch status --json")
    from orchestrator.view.follow import LaunchDisplay

    out = console()
    with LaunchDisplay(out) as display:
        launch = _asked(recipe, place, overrides, _Silent() if json else display, new=new, latest=latest, why=why)
        try:
            if not json:
                out.print(f"launching {launch.recipe.name} at {launch.place.name}", soft_wrap=True)
            carry_out(launch)
        except BaseException as error:
            launch.close()
            if isinstance(error, KeyboardInterrupt) and not json:
                out.print("interrupted; the same command goes on from here", soft_wrap=True)
            raise
    try:
        if json:
            phase = str(launch.state.get("phase"))
            print_json({"run": launch.run, "place": launch.place.name, "how": launch.how, "phase": phase})
        elif launch.how == "running" and launch.state.get("phase") not in BEFORE_TRAINING:
            _say(out, f"{launch.run} is training already, so nothing was started", launch.run)
        elif detach:
            _say(out, f"{launch.run} runs at {launch.place.name}", launch.run)
        else:
            raise typer.Exit(_follow(out, launch))
    finally:
        launch.close()


def _say(out: Console, what: str, run: str) -> None:
    out.print(what, soft_wrap=True)
    out.print(f"  orch status {run}\n  orch logs -f {run}\n  orch attach {run}\n  orch stop {run}", soft_wrap=True)


def _explain(recipe: str, place: str | None, overrides: list[str], *, new: bool, latest: bool) -> None:
    from orchestrator.plan import plan_launch
    from orchestrator.view.plan import print_plan

    launch = _asked(recipe, place, overrides, _Silent(), new=new, latest=latest)
    try:
        plan = plan_launch(launch)
    finally:
        launch.close()
    print(explanation(launch.place, plan.requests))
    print_plan(console(), plan)
    print("To know this, facts were read over one connection. Nothing was started or changed.")


def _follow(out: Console, launch: Launch) -> int:
    from orchestrator.cli.diagnose import show_bad_end
    from orchestrator.view.follow import FollowDisplay, summary

    last: RunStatus | None = None
    tail = b""
    try:
        with FollowDisplay(out, _total_steps(launch.recipe.settings)) as display:
            for event in follow(launch.place, launch.run, session=launch.session, wait=1.0):
                if isinstance(event, Interrupted):
                    display.interrupted(event.reason, event.seconds)
                    continue
                last = event.status
                tail = (tail + last.log)[-_LOG_KEPT:]
                display.observed(last)
    except KeyboardInterrupt:
        _say(out, f"left {launch.run}, which goes on at {launch.place.name}", launch.run)
        return 130
    assert last is not None
    summary(out, last, tail)
    show_bad_end(out, launch.place, launch.run, last.phase, launch.session)
    out.print(f"  orch logs {launch.run}", soft_wrap=True)
    return 0 if last.phase == "finished" else 1


def _total_steps(settings: dict[str, Any]) -> int | None:
    """How many steps the bundled trainer will take, where its settings say so."""
    steps = settings.get("steps") or (settings.get("train") or {}).get("steps")
    return steps if isinstance(steps, int) else None
