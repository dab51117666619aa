"""The runner's side of the compile cache: a private copy before the trainer starts, a new snapshot of it at the end.

A cache can make a run faster and nothing else: whatever goes wrong here is told and the run goes on with an empty one.
The trainer finds its copy by the variables of launch.json, at `<run>/cache/inductor` and `<run>/cache/triton`.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import cache_copy, cache_errors, cache_sweep
from . import cache_store as store
from .cache_files import TOPS, Damaged, Row
from .files import remove_tree
from .frames import OpError
from .recorder import Recorder
from .rundir import RunDir, State

HARVEST_LIMIT = 180.0  # seconds that a run's end waits for its harvest
_TICK = 0.1  # seconds between two ticks while files are copied
_TOLD = 8  # names in an event


class Stopped(Exception):
    """Somebody wants the run to stop, or it took too long: what is under way is given up."""


class RunCache:
    """Of one run. Nothing is done by making one."""

    def __init__(self, run: RunDir, launch: Dict[str, Any], records: Recorder, say: Callable[[str], None]) -> None:
        record = launch.get("cache")
        self._asked: Dict[str, Any] = record if isinstance(record, dict) else {}
        self._folder = run.file("cache")
        self._root = os.path.dirname(os.path.dirname(run.real))
        self._run, self._records, self._say = run, records, say
        self._begun: Optional[Tuple[str, str, List[Row]]] = None  # key, digest, files
        self._generation = (launch.get("generation") or {}).get("cache")
        self._log_from = 0
        self.advice = ""  # what the record of the run's end adds
        self._last = 0.0
        self._fields: Dict[str, Any] = {
            key: value for key, value in self._asked.items() if key not in ("parts", "label")
        }
        self._fields.update(copied=None, moved_aside=None, harvest=None)

    @property
    def moved_aside(self) -> Optional[Dict[str, Any]]:
        """`{"snapshot", "why", "restarted"}` once a snapshot was taken out of use for this run's sake."""
        found = self._fields["moved_aside"]
        return found if isinstance(found, dict) else None

    # ---- before the trainer -------------------------------------------------------------------

    def prepare(self, tick: Callable[[], Any]) -> None:
        """The private copy, or an empty one. `tick` is called now and then. Raises OSError where not even a folder can
        be made; what the copy is wanted for has begun to stop once `stop.json` is there."""
        if not self._asked:
            return  # nothing is known of a cache: the trainer makes its own
        self._empty()
        name = self._named()
        if name is not None:
            key, digest = name
            began = time.monotonic()
            try:
                copied = cache_copy.copy(self._root, key, digest, self._folder, self._ticker(tick, stop=True))
                self._begun = (key, digest, copied.rows)
                how = {"files": len(copied.rows), "bytes": sum(row[1] for row in copied.rows)}
                how.update(seconds=round(time.monotonic() - began, 2))
                self._fields["copied"] = dict(how, how="reflinked" if copied.reflinked else "copied")
                self._records.event("cache_copied", snapshot="%s/%s" % name, **self._fields["copied"])
            except Damaged as error:
                self._move_aside(name, "%s %s" % (error.path, error.why), restarted=False)
            except Stopped:
                pass
            except (cache_copy.Gone, OpError, OSError) as error:
                self._records.event("cache_not_copied", snapshot="%s/%s" % name, why=str(error))
                self._say("the compile cache %s/%s cannot be used: %s" % (key, digest, error))
            if self._begun is None:
                self._empty()
        self._make_tops()
        self._records.set(cache=self._fields)

    def started(self) -> None:
        """The trainer is about to start: what it says from here on is its own."""
        with contextlib.suppress(OSError):
            self._log_from = os.stat(self._run.console).st_size

    def _named(self) -> Optional[Tuple[str, str]]:
        """What the copy is made of: the snapshot of the run's own key, else the seed."""
        key, digest, seed = (self._asked.get(name) for name in ("key", "snapshot", "seed"))
        for name in ("%s/%s" % (key, digest) if key and digest else None, seed):
            if name:
                with contextlib.suppress(OpError):
                    return store.split_name(name)
        return None

    def _empty(self) -> None:
        if os.path.lexists(self._folder):
            remove_tree(self._folder)
        os.makedirs(self._folder, 0o700, exist_ok=True)

    def _make_tops(self) -> None:
        for top in TOPS:
            os.makedirs(os.path.join(self._folder, top), exist_ok=True)

    def _ticker(self, tick: Callable[[], Any], stop: bool, end: float = 0.0) -> Callable[[], None]:
        def step() -> None:
            now = time.monotonic()
            if now - self._last < _TICK:
                return
            self._last = now
            tick()
            if (stop and self._run.stop_request() is not None) or (end and now > end):
                raise Stopped()

        return step

    # ---- a bad entry --------------------------------------------------------------------------

    def broke(self, restart: bool) -> Optional[str]:
        """Once the trainer has failed before its first step: torch's own line about a bad entry of what the run began
        with, which is then moved aside, and the copy empty; None where it is not that. At most once a run.

        `restart`: whether the trainer is started again by the caller."""
        if self._begun is None or self.moved_aside is not None:
            return None
        why = cache_errors.bad_entry_in(self._run.console, self._log_from)
        if why is None:
            return None
        name = self._begun[:2]
        self._begun = None
        self._move_aside(name, why[:500], restarted=restart)
        if not restart:
            self.advice = "; a bad entry of its compile cache was moved aside: launch again"
            return why
        with contextlib.suppress(OSError):  # what cannot be emptied fails the program once more, and then for good
            self._empty()
            self._make_tops()
        return why

    def _move_aside(self, name: Tuple[str, str], why: str, restarted: bool) -> None:
        self._fields["moved_aside"] = {"snapshot": "%s/%s" % name, "why": why, "restarted": restarted}
        moved: Optional[str] = None
        trouble: Optional[str] = None
        try:
            moved = store.move_aside(self._root, name[0], name[1], why, self._run.run)
        except (OSError, TimeoutError) as error:
            trouble = str(error)
        self._records.event(
            "cache_moved_aside", key=name[0], snapshot=name[1], why=why, restarted=restarted, to=moved, trouble=trouble
        )
        self._records.set(cache=self._fields)
        self._records.urgent()
        self._say("a bad entry in the compile cache %s/%s: %s" % (name[0], name[1], why))
        if restarted:
            self._say("it is moved aside, and the program starts once more with an empty one")

    # ---- the end ------------------------------------------------------------------------------

    def end(self, phase: str, state: State, tick: Callable[[], Any]) -> Optional[str]:
        """Harvests where the run became healthy, tells how the cache was used, removes the copy. `phase`: the one that
        the run ends with. "<key>/<digest>" of a new snapshot that the run's generation is to name, which named none or
        one that was moved aside; or None. Raises nothing that a disk or another program can cause."""
        if not os.path.isdir(self._folder):
            return None
        compiled = state.get("compile") if isinstance(state.get("compile"), dict) else None
        told = None
        try:
            if self._asked.get("key") and state.get("trainer"):
                told = self._harvest(phase, state, compiled, tick)
            if told is not None:
                self._fields["harvest"] = told
                self._records.set(cache=self._fields)
                self._records.event("cache_harvest", **told)
                if told["how"] == "harvested":
                    self._say("the compile cache is kept: %d new files, %s" % (told["files"], told["digest"]))
                self._used(told, state, compiled)
        finally:
            remove_tree(self._folder)
        if told is not None and told["digest"] is not None and (self._generation is None or self.moved_aside):
            return "%s/%s" % (self._asked["key"], told["digest"])
        return None

    def _harvest(
        self, phase: str, state: State, compiled: Optional[Dict[str, Any]], tick: Callable[[], Any]
    ) -> Dict[str, Any]:
        told: Dict[str, Any] = {"how": "not healthy", "digest": None, "files": 0, "bytes": 0, "why": None}
        health = state.get("health")
        if phase != "finished" and (not health or health.get("fast_enough") is False):
            return told
        key = str(self._asked["key"])
        misses = None if compiled is None else (compiled.get("misses") or 0) + (compiled.get("rebuilt") or 0)
        about = {"from": self._run.run, "cold_seconds": self._cold_seconds(compiled)}
        step = self._ticker(tick, stop=False, end=time.monotonic() + HARVEST_LIMIT)
        try:
            swept = cache_sweep.sweep(self._folder)
            if swept:
                self._records.event("cache_swept", files=["%s %s" % one for one in swept[:_TOLD]], count=len(swept))
            store.make_key(self._root, key, self._asked.get("parts"), self._asked.get("label"))
            made = cache_copy.harvest(self._root, key, self._folder, self._begun, about, misses == 0, step)
        except Stopped:
            told.update(how="failed", why="it took more than %.0f s" % HARVEST_LIMIT)
        except (OpError, OSError, TimeoutError) as error:
            told.update(how="failed", why=str(error))
        else:
            told.update(how=made.how, digest=made.digest, files=made.files, bytes=made.bytes)
            if made.notes:
                told["why"] = "; ".join(["left out: %s" % note for note in made.notes[:_TOLD]])
        return told

    def _cold(self, compiled: Optional[Dict[str, Any]]) -> bool:
        return self._begun is None and compiled is not None and bool(compiled.get("misses"))

    def _cold_seconds(self, compiled: Optional[Dict[str, Any]]) -> Optional[float]:
        """What a cold compile of this key took: this one, or the one that the copy comes from."""
        if self._cold(compiled):
            assert compiled is not None
            return compiled.get("seconds")
        if self._begun is None:
            return None
        found = (store.read_manifest(self._root, self._begun[0], self._begun[1])[0] or {}).get("cold_seconds")
        return float(found) if isinstance(found, (int, float)) else None

    def _used(self, told: Dict[str, Any], state: State, compiled: Optional[Dict[str, Any]]) -> None:
        key = str(self._asked["key"])
        if not os.path.isdir(store.key_dir(self._root, key)) and compiled is None:
            return  # nothing is known, not even a cache
        begun = "%s/%s" % self._begun[:2] if self._begun is not None else None
        own = self._begun is not None and self._begun[0] == key
        line: Dict[str, Any] = {"run": self._run.run, "recipe": state.get("recipe"), "at": round(time.time(), 3)}
        line.update(predicted=self._asked.get("predicted"), snapshot=self._begun[1] if self._begun and own else None)
        line.update(seed=None if own else begun, how=told["how"], made=told["digest"])
        for name in ("hits", "misses", "rebuilt", "new_files"):
            line[name] = None if compiled is None else compiled.get(name)
        line["compile_seconds"] = None if compiled is None else compiled.get("seconds")
        line["cold"] = self._cold(compiled)
        with contextlib.suppress(OSError):
            store.make_key(self._root, key, self._asked.get("parts"), self._asked.get("label"))
            store.used(self._root, key, line)
