"""Generations: what each launch of a recipe used, how it turned out, and the pin that holds a recipe to one.

`<root>/recipes/<name>/generations.jsonl` is append-only. A line `{"event": "started", "generation": n, …}` is one
generation, `{"event": "mark", "generation": n, "standing", "by"}` says how it stands, `{"event": "cache",
"generation": n, "cache"}` names the compile cache that its run made where it began with none, or with one that was
moved aside, and `{"event": "pinned" | "lifted"}` is for people. `<root>/recipes/<name>/pin` is replaced or removed in
one step.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from .frames import OpError
from .rundir import RUN_ID, append_line, locked, read_json, write_json

if TYPE_CHECKING:
    from .serve import Call

PATIENCE = 10.0  # seconds that another's change may take
STANDINGS = ("new", "good", "bad")
RUNNER = "runner"  # who marks by itself; what a person says goes before it
_LARGEST = 64 << 20


def recipes_dir(root: str) -> str:
    return os.path.join(root, "recipes")


def folder(root: str, recipe: Any) -> str:
    """The folder of a recipe. Raises OpError for what is no name of one."""
    if not isinstance(recipe, str) or not RUN_ID.match(recipe) or len(recipe) > 40:
        raise OpError("usage", "%r is no name of a recipe" % (recipe,))
    return os.path.join(recipes_dir(root), recipe)


def names(root: str) -> List[str]:
    """The recipes that anything is known of here."""
    try:
        return sorted(name for name in os.listdir(recipes_dir(root)) if RUN_ID.match(name))
    except OSError:
        return []


def read(root: str, recipe: str) -> List[Dict[str, Any]]:
    """All generations, the oldest first, each with its `standing`, `marked_by` and `marked_at`.

    A broken line costs itself. Raises OSError where the file is there and cannot be read.
    """
    found: Dict[int, Dict[str, Any]] = {}
    for line in _lines(os.path.join(folder(root, recipe), "generations.jsonl")):
        number = line.get("generation")
        if not isinstance(number, int):
            continue
        if line.get("event") == "started" and number not in found:
            found[number] = dict(line, standing="new", marked_by=None, marked_at=None)
        elif line.get("event") == "cache" and number in found:
            found[number]["cache"] = line.get("cache")
        elif line.get("event") == "mark" and number in found and line.get("standing") in STANDINGS:
            entry = found[number]
            if line.get("by") == RUNNER and entry["marked_by"] not in (None, RUNNER):
                continue
            entry.update(standing=line["standing"], marked_by=line.get("by"), marked_at=line.get("at"))
            entry["mark_why"] = line.get("why")
    return [found[number] for number in sorted(found)]


def _lines(path: str) -> List[Dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST)
    except FileNotFoundError:
        return []
    found = []
    for raw in data.split(b"\n"):
        try:
            line = json.loads(raw.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def read_pin(root: str, recipe: str) -> Optional[Dict[str, Any]]:
    """The pin, or None. Raises OpError where there is one that cannot be read: it is never passed over."""
    path = os.path.join(folder(root, recipe), "pin")
    pin, why = read_json(path)
    if pin is None and os.path.lexists(path):
        raise OpError("failed", "the pin of %s cannot be read (%s)" % (recipe, why))
    return pin


def begin(root: str, recipe: str, entry: Dict[str, Any]) -> int:
    """Appends the generation of a run that starts, once a run, and answers its number. Raises OSError, TimeoutError."""
    home = folder(root, recipe)
    os.makedirs(home, 0o755, exist_ok=True)
    with locked(os.path.join(home, ".lock"), PATIENCE):
        known = read(root, recipe)
        for earlier in known:
            if earlier.get("run") == entry.get("run"):
                return int(earlier["generation"])
        number = 1 + max([one["generation"] for one in known], default=0)
        line = dict(entry, version=1, event="started", generation=number, at=time.time())
        append_line(os.path.join(home, "generations.jsonl"), json.dumps(line, ensure_ascii=False))
        return number


def mark(root: str, recipe: str, number: int, standing: str, by: str, why: Optional[str]) -> None:
    """Appends how a generation stands. Raises OSError, TimeoutError."""
    home = folder(root, recipe)
    line = {"event": "mark", "generation": number, "standing": standing, "by": by, "why": why, "at": time.time()}
    with locked(os.path.join(home, ".lock"), PATIENCE):
        append_line(os.path.join(home, "generations.jsonl"), json.dumps(line, ensure_ascii=False))


def add_cache(root: str, recipe: str, number: int, cache: str) -> None:
    """Appends which compile cache ("<key>/<digest>") a generation made, in place of what it had. Raises OSError,
    TimeoutError."""
    home = folder(root, recipe)
    with locked(os.path.join(home, ".lock"), PATIENCE):
        _tell(home, {"event": "cache", "generation": number, "cache": cache})


class Chronicle:
    """What a runner tells of its own run's generation; what the disk does not take is told again later."""

    def __init__(self, root: str, run: str, about: Dict[str, Any]) -> None:
        """`about` is `generation` of launch.json; without a recipe in it nothing is told."""
        self._root = root
        self._entry = {key: value for key, value in about.items() if key != "recipe"}
        self._entry["run"] = run
        self._recipe = about.get("recipe")
        self._begun = self._recipe is None
        self._marks: List[Any] = []
        self._cache: Optional[str] = None
        self._next = 0.0
        self.number: Optional[int] = None

    def mark(self, standing: str, why: str) -> None:
        if self._recipe is not None:
            self._marks.append((standing, why))
            self._next = 0.0

    def made(self, cache: str) -> None:
        """The run made this compile cache ("<key>/<digest>"), which its generation names from now on."""
        if self._recipe is not None:
            self._cache = cache
            self._next = 0.0

    def ended(self, phase: str, reason: str, mark: Optional[Dict[str, Any]], state: Dict[str, Any]) -> None:
        """How the generation stands by the run's end: what failed before it was healthy is bad. Without a health
        `mark` in the recipe, ending well is the mark."""
        asked = any((mark or {}).get(key) is not None for key in ("step", "tokens_per_second"))
        reached = state.get("health")
        healthy = reached is not None and reached.get("fast_enough") is not False
        if phase == "finished" and not asked:
            self.mark("good", "finished")
        elif phase == "failed" and not healthy:
            self.mark("bad", reason)
        self.step()

    def step(self) -> None:
        """Write what is due. Raises nothing that a full disk or a busy lock can cause."""
        if (self._begun and not self._marks and self._cache is None) or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 2.0
        recipe = str(self._recipe)
        try:
            if not self._begun:
                self.number = begin(self._root, recipe, self._entry)
                self._begun = True
            while self._marks and self.number is not None:
                standing, why = self._marks[0]
                mark(self._root, recipe, self.number, standing, RUNNER, why)
                self._marks.pop(0)
            if self._cache is not None and self.number is not None:
                add_cache(self._root, recipe, self.number, self._cache)
                self._cache = None
        except (OSError, TimeoutError):
            return


# --- operations ------------------------------------------------------------------------------------


def generations(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{recipe}` (null: all) -> `{"recipes": [{"recipe", "pin", "generations"}]}`; each generation also tells
    whether its `environment` and `code` are here: `environment_here`, `code_here`, and its compile cache:
    `cache_here`, null where it names none."""
    asked = args.get("recipe")
    found = []
    for name in names(call.root) if asked is None else [asked]:
        known = read(call.root, name)
        for one in known:
            one["environment_here"] = os.path.exists(
                os.path.join(call.root, "envs", str(one.get("environment")), "manifest.json")
            )
            one["cache_here"] = _cache_here(call.root, one.get("cache"))
            one["code_here"] = os.path.isdir(
                os.path.join(call.root, "code", str((one.get("code") or {}).get("digest")))
            )
        found.append({"recipe": name, "pin": read_pin(call.root, name), "generations": known})
    return {"recipes": found}


def _cache_here(root: str, name: Any) -> Optional[bool]:
    if not isinstance(name, str) or not re.match(r"[0-9a-f]{16}/[0-9a-f]{16}\Z", name):
        return None
    key, digest = name.split("/")
    return os.path.exists(os.path.join(root, "caches", key, "snapshots", digest, "manifest.json"))


def pin(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{recipe}` -> `{"pin"}`: what the next launch takes, or null."""
    return {"pin": read_pin(call.root, args.get("recipe") or "")}


def pin_set(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{recipe, generation, by, why}` -> `{"pin", "before"}`: from here on launches take all of this generation."""
    recipe = args.get("recipe") or ""
    home = folder(call.root, recipe)
    chosen = _generation(call.root, recipe, args.get("generation"))
    new: Dict[str, Any] = {key: chosen.get(key) for key in ("generation", "run", "environment", "cache", "code")}
    new.update(environment_name=chosen.get("environment_name"), by=args.get("by"), why=args.get("why"))
    new.update(version=1, at=time.time())
    with _locked(home):
        before = read_pin(call.root, recipe)
        _tell(home, {"event": "pinned", "to": new["generation"], "by": new["by"], "why": new["why"]})
        write_json(os.path.join(home, "pin"), new)
    return {"pin": new, "before": before}


def pin_lift(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{recipe, by}` -> `{"before"}`: launches take what the working tree says again."""
    recipe = args.get("recipe") or ""
    home = folder(call.root, recipe)
    if not os.path.lexists(os.path.join(home, "pin")):
        return {"before": None}
    with _locked(home):
        before, _ = read_json(os.path.join(home, "pin"))
        _tell(home, {"event": "lifted", "by": args.get("by")})
        os.unlink(os.path.join(home, "pin"))
    return {"before": before}


def generation_mark(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{recipe, generation, standing, by, why}` -> `{"generation"}`: a person's word, before the runner's."""
    recipe, standing = args.get("recipe") or "", args.get("standing")
    if standing not in STANDINGS:
        raise OpError("usage", "%r is no standing: new, good or bad" % (standing,))
    chosen = _generation(call.root, recipe, args.get("generation"))
    by = str(args.get("by") or "someone")
    try:
        mark(call.root, recipe, chosen["generation"], standing, by, args.get("why"))
    except TimeoutError as error:
        raise OpError("failed", str(error)) from None
    return {"generation": _generation(call.root, recipe, chosen["generation"])}


def _generation(root: str, recipe: str, number: Any) -> Dict[str, Any]:
    for one in read(root, recipe):
        if one["generation"] == number:
            return one
    raise OpError("not_found", "%s has no generation %s here" % (recipe, number))


def _locked(home: str) -> Any:
    return locked(os.path.join(home, ".lock"), PATIENCE)


def _tell(home: str, line: Dict[str, Any]) -> None:
    line["at"] = time.time()
    append_line(os.path.join(home, "generations.jsonl"), json.dumps(line, ensure_ascii=False))


OPS = {
    "generations": generations,
    "pin": pin,
    "pin_set": pin_set,
    "pin_lift": pin_lift,
    "generation_mark": generation_mark,
}
