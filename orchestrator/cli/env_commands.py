"""What `orch env` does."""

from __future__ import annotations

import re
from typing import Any

import typer

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.cli.rollback import agreed, meant_recipe
from orchestrator.config import Place, load_environment, resolve_place
from orchestrator.errors import NotFound, OrchError, Unreachable, UsageError
from orchestrator.explain import explanation
from orchestrator.place.session import Session, open_session

_CHECK_LIMIT = 900.0  # seconds


def meant_place(name: str | None) -> Place:
    """The place given, else that of the latest launch, else this machine."""
    from orchestrator import history
    from orchestrator.survey import is_place

    project, hosts = project_and_hosts()
    if name is None:
        known = [entry for entry in history.known(None) if is_place(hosts, entry.place)]
        name = max(known, key=lambda entry: entry.created).place if known else "local"
    return resolve_place(hosts, name, project)


def meant_places(name: str | None, all_: bool) -> list[Place]:
    from orchestrator.survey import all_places

    if name is not None and all_:
        raise UsageError("--all means every place: it goes without PLACE")
    return all_places(project_and_hosts()[1]) if all_ else [meant_place(name)]


def lock_command(name: str) -> None:
    """Write the lock and say what is missing in it."""
    from orchestrator.config.project import list_environments
    from orchestrator.environment.relock import write
    from orchestrator.view.follow import LaunchDisplay

    project, _ = project_and_hosts()
    directory = list_environments(project).get(name)
    if directory is None:
        load_environment(project, name)  # says what there is
        return
    out = console()
    with LaunchDisplay(out) as display:
        display.begin("lock")
        done = write(directory, lambda what, done, total, unit: display.progress("lock", what, done, total, unit))
        display.end("lock", f"{done.path}: {done.distributions} distributions")
    for line in done.missing:
        out.print(f"  no hash of {line}", soft_wrap=True)
    if done.missing:
        out.print(
            "the lock is incomplete: where an index that has these files can be reached, this completes it\n"
            f"  orch env lock {name}\nuntil then a build that needs one of them says so, and takes it only with\n"
            f"  orch env build {name} PLACE --allow-unhashed",
            soft_wrap=True,
        )
    else:
        out.print(f"every file has a hash\n  orch env build {name} PLACE", soft_wrap=True)


def build_command(name: str, place: str | None, *, allow_unhashed: bool, explain: bool, json: bool) -> None:
    """Build, or say that it is there."""
    from orchestrator.environment.build import again, ensure, plan
    from orchestrator.environment.lock import missing
    from orchestrator.view.follow import LaunchDisplay

    where = meant_place(place)
    by_id = re.fullmatch(r"[0-9a-f]{16}", name) is not None
    spec = None if by_id else load_environment(project_and_hosts()[0], name)
    if spec is not None and allow_unhashed:
        spec = spec.model_copy(update={"allow_unhashed": True})
    if explain:
        _explain_build(where, name, None if spec is None else lambda session: plan(session, spec))
        for what in missing(spec.lock_text) if spec is not None else []:
            print(
                f"the lock has no hash of {what}: what needs it is refused until it is completed (orch env lock {name})"
            )
        return
    out = console()
    with LaunchDisplay(out) as display, open_session(where) as session:
        if not json:
            display.begin("environment")

        def progress(what: str, done: int, total: int | None, unit: str) -> None:
            if not json:
                display.progress("environment", what, done, total, unit)

        if spec is None:
            built = again(session, name, progress)
        else:
            built = ensure(session, spec, progress=progress, anew=True)
        if not json:
            how = {"there": "is there, and clean", "built": "built", "waited": "built by another meanwhile"}[built.how]
            display.end("environment", f"{name} {built.id} {how}")
    if json:
        answer = {"id": built.id, "path": built.path, "how": built.how, "bytes_sent": built.bytes_sent}
        print_json({"place": where.name, **answer, "notes": list(built.notes), "manifest": dict(built.manifest)})
        return
    manifest = built.manifest
    torch = manifest.get("torch") or {}
    parts = [f"Python {manifest['python']['version']}", f"{len(manifest['distributions'])} packages"]
    parts += [f"torch {torch['version']} (CUDA {torch['cuda'] or 'none'})"] if torch else []
    protected = manifest["protected"]
    parts.append("write-protected" if protected["how"] == "immutable" else f"not write-protected: {protected['why']}")
    out.print(f"  {', '.join(parts)}\n  {built.path}", soft_wrap=True)
    for note in built.notes:
        out.print(f"  note: {note}", soft_wrap=True)


def _explain_build(where: Place, name: str, planned: Any) -> None:
    if planned is None:
        print(
            explanation(where, [f"is environment {name} there, and clean?", "build it again as its manifest recorded"])
        )
        return
    with open_session(where) as session:
        plan = planned(session)
    requests = [f"is environment {plan.id} there, and clean?"]
    if plan.polluted:
        requests.append("set it aside")
    if not plan.present:
        requests.append("which of its files are there?")
        requests += [f"put {file.name}" for file in plan.files if not file.there]
        requests.append("build it, and verify it")
    print(explanation(where, requests))
    print(f"for {plan.target}: {plan}")
    print("To know this, facts were read over one connection. Nothing was built or changed.")


def verify_command(place: str | None, *, all_: bool, deep: bool, explain: bool, json: bool) -> None:
    """Check every environment at the places.

    Raises:
        typer.Exit: 1 when one is polluted.
        Unreachable: a place did not answer (after showing the others).
    """
    from orchestrator.view.environments import print_checked

    places = meant_places(place, all_)
    if explain:
        how = "digest every file" if deep else "compare sizes and times; digest what differs"
        requests = ["which environments are there?", f"for each: {how}; set a polluted one aside that nothing uses"]
        print("\n".join(explanation(one, requests) for one in places))
        return
    answers: list[dict[str, Any]] = []
    failed: list[OrchError] = []
    for one in places:
        answer: dict[str, Any] = {"place": one.name, "error": None, "environments": []}
        try:
            with open_session(one) as session:
                answer["environments"] = _checked(session, deep)
        except OrchError as error:
            failed.append(error)
            answer["error"] = error.message
        answers.append(answer)
    polluted = [(one["place"], env) for one in answers for env in one["environments"] if not env["clean"]]
    if json:
        print_json({"places": answers})
    else:
        for one_answer in answers:
            if one_answer["error"]:
                console().print(f"{one_answer['place']}: {one_answer['error']}", soft_wrap=True)
            else:
                print_checked(console(), one_answer["place"], one_answer["environments"])
        for where, env in polluted:
            console().print(f"  orch env build {env['name'] or env['id']} {where}", soft_wrap=True)
    if failed and len(failed) == len(places):
        raise failed[0] if len(failed) == 1 else Unreachable("no place answered")
    if polluted:
        raise typer.Exit(1)


def _checked(session: Session, deep: bool) -> list[dict[str, Any]]:
    """Each environment's report. One that was found polluted before is told again; what was replaced since is not."""
    found = session.call("env_list", {}, timeout=_CHECK_LIMIT).data["environments"]
    present = {one["id"] for one in found if one["entry"] == one["id"]}
    wanted = {one["id"]: one for one in found if one["entry"] == one["id"] or one["id"] not in present}
    reports = []
    for ident, one in wanted.items():
        args = {"id": ident, "verify": "deep" if deep else "quick", "record": True}
        answer = session.call("env_status", args, timeout=_CHECK_LIMIT).data
        polluted = answer["polluted"]
        if polluted is None and not answer["present"]:
            continue
        report = {"id": ident, "name": (one["manifest"] or {}).get("name"), "clean": polluted is None}
        report.update(checked=answer["checked"], notes=answer["notes"], path=answer["path"])
        report.update(summary="", findings=[], runs=[], processes=[])
        for key in ("summary", "findings", "runs", "processes", "path") if polluted else ():
            report[key] = polluted[key]
        reports.append(report)
    return reports


def list_command(place: str | None, *, explain: bool, json: bool) -> None:
    """Show what is at one place, or at all."""
    from orchestrator.generations import generations
    from orchestrator.view.environments import print_list

    places = meant_places(place, place is None)
    if explain:
        print("\n".join(explanation(one, ["the environments", "the generations and pins"]) for one in places))
        return
    answers: list[dict[str, Any]] = []
    failed: list[OrchError] = []
    for one in places:
        try:
            with open_session(one) as session:
                found = session.call("env_list", {}, timeout=60.0).data
                recipes = generations(session, None)
        except OrchError as error:
            failed.append(error)
            answers.append({"place": one.name, "error": error.message, "environments": [], "recipes": []})
            if not json:
                console().print(f"{one.name}: {error.message}", soft_wrap=True)
            continue
        answers.append({"place": one.name, "error": None, "environments": found["environments"], "recipes": recipes})
        if not json:
            print_list(console(), one.name, found, recipes)
    if json:
        print_json({"places": answers})
    if failed and len(failed) == len(places):
        raise failed[0] if len(failed) == 1 else Unreachable("no place answered")


def use_command(recipe: str, place: str | None, *, generation: int | None, why: str) -> None:
    """Lift the pin, or set one."""
    from orchestrator.generations import check, choose, lift_pin, set_pin

    name, where = meant_recipe(recipe, place)
    out = console()
    with open_session(where) as session:
        if generation is None:
            before = lift_pin(session, name)
            if before is None:
                out.print(f"{name} at {where.name} was not pinned: launches take the working tree", soft_wrap=True)
            else:
                out.print(
                    f"the pin of {name} at {where.name} to generation {before['generation']} is lifted: launches take "
                    f"the working tree again\n  orch launch {name} --place {where.name}",
                    soft_wrap=True,
                )
            return
        chosen, *_ = choose(session, name, generation)
        check(session, name, chosen)
        set_pin(session, name, generation, why or "env use")
    out.print(f"{name} at {where.name} is pinned to generation {generation}", soft_wrap=True)


def mark_command(recipe: str, generation: int, standing: str, place: str | None, *, why: str) -> None:
    """Mark a generation."""
    from orchestrator.generations import mark
    from orchestrator.view.environments import generation_line

    if standing not in ("good", "bad", "new"):
        raise UsageError(f"a generation is good, bad or new, not {standing}")
    name, where = meant_recipe(recipe, place)
    with open_session(where) as session:
        try:
            one = mark(session, name, generation, standing, why)
        except NotFound as error:
            raise NotFound(error.message, hint=f"orch env list {where.name}") from None
    console().print(f"{name} at {where.name}\n  {generation_line(one).strip()}", soft_wrap=True)


def gc_command(place: str | None, *, yes: bool, explain: bool, json: bool) -> None:
    """Remove what nothing needs, after a yes."""
    from orchestrator.view.environments import print_gc

    where = meant_place(place)
    if explain:
        print(explanation(where, ["which environments does nothing need?", "after a yes: remove those"]))
        return
    out = console()
    with open_session(where) as session:
        found = session.call("env_gc", {"remove": None}, timeout=_CHECK_LIMIT).data
        if not json:
            print_gc(out, where.name, found)
        removed: list[dict[str, Any]] = []
        if found["candidates"] and (yes or not json):
            if not agreed("remove them?", yes, f"orch env gc {where.name} --yes"):
                out.print("nothing was removed", soft_wrap=True)
                return
            entries = [item["entry"] for item in found["candidates"]]
            removed = session.call("env_gc", {"remove": entries}, timeout=_CHECK_LIMIT).data["removed"]
    if json:
        print_json({"place": where.name, "kept": found["kept"], "candidates": found["candidates"], "removed": removed})
    elif removed:
        out.print(f"removed {len(removed)}, {sum(item['bytes'] for item in removed):,} bytes", soft_wrap=True)
