"""The server's operations on environments: is one there and clean, build it, list all, remove some."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from . import environment_state as state
from .environment_build import arguments_of, build
from .environment_make import named
from .environment_verify import check
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call


def env_status(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Whether the environment `id` is here, and clean: `present`, `path`, `manifest`, `polluted`, `checked`, `notes`.

    `verify`: "no" (its name alone), "quick", "deep", or "auto" (quick, and deep where there is cause). `record`:
    keep what is found, and set a polluted one aside. `polluted` is null or the report; `present` is false then.
    """
    path = state.path_of(call.root, args["id"])
    manifest = state.read_manifest(path)
    answer: Dict[str, Any] = {"present": manifest is not None, "path": path, "manifest": state.brief(manifest)}
    answer.update(polluted=None, checked=None, notes=[])
    known = state.verdict(call.root, args["id"]).get("polluted")
    if known is not None:
        answer.update(present=False, polluted=state.polluted(call.root, args["id"], known))
        return answer
    mode = args.get("verify") or "no"
    if manifest is None or mode == "no":
        return answer
    why = state.wants_deep(call.root, args["id"]) if mode == "auto" else None
    report = _checked(path, manifest, call, deep=mode == "deep" or why is not None)
    answer["notes"] = report["notes"]
    answer["checked"] = {key: report[key] for key in ("deep", "files", "digested", "seconds")}
    answer["checked"]["why"] = why
    if not report["clean"]:
        if args.get("record"):
            told = state.found_polluted(call.root, args["id"], report)
        else:
            told = state.polluted(call.root, args["id"], report)
        answer.update(present=False, polluted=told)
    elif report["deep"]:
        state.digested(call.root, args["id"])
    return answer


def _checked(path: str, manifest: Dict[str, Any], call: Call, deep: bool) -> Dict[str, Any]:
    def tick(done: int, total: int) -> None:
        call.event({"step": "digesting", "done": done, "total": total, "unit": "files"})

    try:
        return check(path, manifest, deep, tick)
    except OSError as error:
        raise OpError("failed", "%s cannot be read, so nothing is known of it: %s" % (path, error)) from None


def env_build(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Builds the environment `id`, unless it is there or another builder finishes it meanwhile.

    `uv` and `python` are programs, `requirements` is text with hashes, `wheels` is a list of {path, filename,
    sha256}; paths that are not absolute are under the root. `source` is null (those wheels alone), or {kind:
    "index" | "mirror" | "folder", where, backend}. `expect` is {"torch": version or null, "cuda": version or null}.
    `about` goes into the manifest. `protect`: make it immutable. `anew`: also where it was found polluted. `again`:
    all of it as recorded by the one that was here. Answers `how` ("built", "there", "waited"), `path`, `manifest`.
    """
    path = state.path_of(call.root, args["id"])
    ident = args["id"]
    found = _usable(call, ident, args)
    if found is not None:
        return {"how": "there", "path": path, "manifest": state.brief(found)}
    try:
        lock, waited = state.lock(path, call)
    except OSError as error:
        raise named(error, path) from None
    try:
        found = _usable(call, ident, args)
        if found is not None:
            return {"how": "waited" if waited else "there", "path": path, "manifest": state.brief(found)}
        state.sweep(os.path.dirname(path), ident)
        wanted = dict(_recorded(call, ident), uv=args["uv"]) if args.get("again") else args
        if wanted is not args and args.get("source"):
            wanted["source"] = args["source"]
        wanted["protect"] = args.get("protect")
        return {"how": "built", "path": path, "manifest": state.brief(build(path, wanted, call, lock))}
    finally:
        os.close(lock)


def _usable(call: Call, ident: str, args: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """The manifest of what is here and not known to be polluted. Raises OpError where that may not be replaced."""
    known = state.verdict(call.root, ident).get("polluted")
    if known is None:
        return state.read_manifest(state.path_of(call.root, ident))
    if not args.get("anew"):
        raise OpError("refused", "environment %s is polluted: %s" % (ident, known.get("summary")))
    return None


def _recorded(call: Call, ident: str) -> Dict[str, Any]:
    """What the newest environment of this id that lies here was built from. Raises OpError."""
    for name in [ident, *reversed(state.aside(call.root, ident))]:
        manifest = state.read_manifest(os.path.join(state.envs_dir(call.root), name))
        if manifest is not None:
            return arguments_of(manifest)
    raise OpError("not_found", "there is no environment %s here, and nothing says how it was built" % ident)


def env_reach(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{uv, requirement, seconds}` -> `{"reached"}`: whether uv finds that package with the place's own settings."""
    environment = dict(os.environ, UV_HTTP_TIMEOUT="5", UV_HTTP_RETRIES="0", UV_SYSTEM_CERTS="true", NO_COLOR="1")
    argv = [os.path.join(call.root, args["uv"]), "pip", "compile", "--quiet", "--no-deps", "--no-cache", "-"]
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=call.root,
        env=environment,
        start_new_session=True,
    )
    call.children.append(child)
    try:
        child.communicate(args["requirement"].encode("ascii"), timeout=float(args["seconds"]))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    finally:
        call.children.remove(child)
    return {"reached": child.returncode == 0}


def env_list(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Every environment here, those set aside too: `{"environments": [{"entry", "id", "manifest", "polluted",
    "runs", "processes", "last_used", "kept_runs"}]}`. `ids`: these alone."""
    from .environment_gc import usage  # looks at runs and generations, which a build need not

    only: Optional[List[str]] = args.get("ids")
    used = usage(call.root)
    found = []
    for entry in state.entries(call.root):
        ident, aside, _ = entry.partition(state.ASIDE)
        if only is not None and ident not in only:
            continue
        manifest = state.brief(state.read_manifest(os.path.join(state.envs_dir(call.root), entry)))
        known = state.verdict(call.root, entry).get("polluted")
        item: Dict[str, Any] = {"entry": entry, "id": ident, "manifest": manifest}
        item["polluted"] = known or ({"summary": "set aside", "at": None} if aside else None)
        item.update(
            {"kept_by": [], "last_used": None} if aside else used.get(ident, {"kept_by": [], "last_used": None})
        )
        item.update(state.users(call.root, ident) if known is not None and not aside else {"runs": [], "processes": []})
        found.append(item)
    return {"environments": found}


OPS = {"env_status": env_status, "env_build": env_build, "env_list": env_list, "env_reach": env_reach}
