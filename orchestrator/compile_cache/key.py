"""What a compile cache is known by, and what is known of a launch's cache before its trainer starts.

All of it is pure. The parts are what was seen to change the keys that torch's own caches use: torch by version and by
the digest of its files, triton likewise, CUDA, the GPUs' names, inductor's configuration, and the static shapes; on a
CPU also the environment's path and the instruction set, since C++ is built against them. The driver, the user, other
paths and the trainer's code change nothing there, so that they are no parts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

KEY = re.compile(r"[0-9a-f]{16}\Z")  # of a key and of a snapshot's digest
CPU_THREADS = "cpu threads"  # an entry of config, which a place with GPUs takes out
# Which cache that was made with other parts may still be begun from: graphs that are the same are found in it.
SEEDING = frozenset({"shapes", "environment_path", "instruction_set"})
REBUILDING = frozenset({"environment_path", "instruction_set"})  # graphs are found, their C++ is built again

# Variables that change inductor's key, and those of the same families that do not: folders, threads, what is logged.
_FAMILIES = re.compile(r"(?:TORCHINDUCTOR|TORCH_COMPILE|TORCHDYNAMO|TRITON)_")
_WITHOUT_EFFECT = re.compile(
    r"TORCHINDUCTOR_(?:CACHE_DIR|COMPILE_THREADS|WORKER_\w+|FILE_LOCK_TIMEOUT|QUIESCE_ASYNC_COMPILE_POOL)\Z"
    r"|TRITON_(?:CACHE_DIR|DUMP_DIR|OVERRIDE_DIR|CACHE_MANAGER|HOME)\Z|\w*(?:_LOG|_LOGS|_LOGPATH|_VERBOSE)\Z"
)
# Settings of the bundled trainer that no graph depends on, by their full names; a section stands for all in it.
SHAPELESS = frozenset(
    {
        "name", "steps", "seed", "spike", "print_every", "optimizer", "checkpoint", "evaluate", "report",
        "data.paths", "data.template", "data.broken_share", "data.anchor_draws", "drafter.initial",
        "topology.timeout", "topology.backend",
    }
)  # fmt: skip
_VARIANT_SHAPELESS = frozenset({"name", "seed", "optimizer", "drafter.initial"})


@dataclass(frozen=True)
class KeyParts:
    """The parts of a key. What only the place knows is None until it has told."""

    torch: str  # version, or "none"
    torch_files: str | None  # digest of its .py and .so files
    triton: str
    triton_files: str | None
    cuda: str  # of torch; "cpu"
    gpu: tuple[str, ...] | None  # distinct names, sorted; () without
    config: Mapping[str, str]
    shapes: Mapping[str, Any]  # {"digest", "settings"}
    environment_path: str | None  # on a CPU; "" with a GPU
    instruction_set: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """As it travels and is kept in key.json."""
        found = asdict(self)
        for name in ("gpu", "instruction_set"):
            found[name] = None if found[name] is None else list(found[name])
        return found

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> KeyParts:
        """From JSON that a place or a file gave; a part that is missing there is None or empty. Raises ValueError."""
        if not isinstance(found, dict):
            raise ValueError("the parts of a key are no object")

        def text(name: str) -> str | None:
            value = found.get(name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} of a key is no text")
            return value

        def names(name: str) -> tuple[str, ...] | None:
            value = found.get(name)
            if value is None:
                return None
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"{name} of a key is no list of names")
            return tuple(value)

        config, shapes = found.get("config") or {}, found.get("shapes") or {}
        if not isinstance(config, dict) or not isinstance(shapes, dict):
            raise ValueError("config and shapes of a key are objects")
        return cls(
            torch=text("torch") or "none",
            torch_files=text("torch_files"),
            triton=text("triton") or "none",
            triton_files=text("triton_files"),
            cuda=text("cuda") or "cpu",
            gpu=names("gpu"),
            config=config,
            shapes=shapes,
            environment_path=text("environment_path"),
            instruction_set=names("instruction_set"),
        )

    @property
    def digest(self) -> str:
        """The key: 16 hex digits of the sha256 of the parts' canonical JSON."""
        return hashlib.sha256(canonical(self.to_json())).hexdigest()[:16]


def canonical(value: Any) -> bytes:
    """JSON by which both ends come to the same digest."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


# --- the parts of a launch -------------------------------------------------------------------------


def parts_of(
    manifest: Mapping[str, Any],
    *,
    variables: Mapping[str, str],
    settings: Mapping[str, Any],
    command: Sequence[str] | None,
    cpus: int | None,
) -> KeyParts:
    """The parts as far as the workstation knows them: the environment's manifest, and what the recipe says.

    `command` is the recipe's own, None for the bundled trainer; `settings` are as in the recipe, with the words such
    as {code} in them, since where the code lies is no part. `cpus` of the place: C++ is built for a number of threads.
    """
    torch = manifest.get("torch") or {}
    version = str(torch.get("version") or "none")
    cuda = torch.get("cuda")
    config = {name: str(value) for name, value in sorted(variables.items()) if changes_key(name)}
    config[CPU_THREADS] = str(variables.get("OMP_NUM_THREADS") or cpus or "unknown")
    return KeyParts(
        torch=version,
        torch_files=None,
        triton=str(manifest.get("triton") or "none"),
        triton_files=None,
        cuda=str(cuda) if cuda else "cpu",
        gpu=() if uses_no_gpu(cuda, settings, command) else None,
        config=config,
        shapes=shapes_of(settings, command),
        environment_path=None,
        instruction_set=None,
    )


def uses_no_gpu(cuda: Any, settings: Mapping[str, Any], command: Sequence[str] | None) -> bool:
    """Whether a run compiles for the processor also where there are GPUs: torch is a CPU build, or the bundled trainer
    is told so."""
    return not cuda or (command is None and settings.get("device") == "cpu")


def changes_key(variable: str) -> bool:
    """Whether a variable of the run is part of inductor's configuration."""
    return _FAMILIES.match(variable) is not None and _WITHOUT_EFFECT.match(variable) is None


def shapes_of(settings: Mapping[str, Any], command: Sequence[str] | None) -> dict[str, Any]:
    """What shapes the graphs: of the bundled trainer the settings but those that do not; else command and settings."""
    if command is None:
        told = _without(settings, SHAPELESS)
        if isinstance(told.get("drafters"), list):
            told["drafters"] = [
                _without(one, _VARIANT_SHAPELESS) if isinstance(one, dict) else one for one in told["drafters"]
            ]
    else:
        told = {"command": list(command), "settings": dict(settings)}
    told = json.loads(canonical(told))
    return {"digest": hashlib.sha256(canonical(told)).hexdigest()[:16], "settings": told}


def _without(settings: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if name in left_out:
            continue
        inner = {rest for section, dot, rest in (full.partition(".") for full in left_out) if dot and section == name}
        kept[name] = _without(value, frozenset(inner)) if inner and isinstance(value, dict) else value
    return kept


# --- comparing -------------------------------------------------------------------------------------


def unequal(a: KeyParts, b: KeyParts) -> list[str]:
    """The names of the parts that differ, in the order of the fields."""
    return [field.name for field in fields(KeyParts) if not _same(field.name, a, b)]


def _same(name: str, a: KeyParts, b: KeyParts) -> bool:
    mine, other = getattr(a, name), getattr(b, name)
    if name == "shapes":
        return bool(mine.get("digest") == other.get("digest"))
    return bool(mine == other)


def differences(before: KeyParts, now: KeyParts) -> list[str]:
    """What changed from one key to another, each a few words such as "triton 3.5.1 → 3.6.0"."""
    told = []
    names = unequal(before, now)
    for name in names:
        old, new = getattr(before, name), getattr(now, name)
        if name in ("torch_files", "triton_files"):
            package = name.removesuffix("_files")
            if package not in names:
                told.append(f"{package}'s files changed ({getattr(now, package)} as before)")
        elif name in ("gpu", "instruction_set"):
            word = "GPU" if name == "gpu" else "instruction set"
            told.append(f"{word} {_listed(old)} → {_listed(new)}")
        elif name == "config":
            told += [_change(key, old.get(key), new.get(key)) for key in _changed(old, new)]
        elif name == "shapes":
            told += _shape_changes(old.get("settings") or {}, new.get("settings") or {})
        else:
            told.append(_change("environment" if name == "environment_path" else name.upper(), old, new, name))
    return told


def _listed(names: Sequence[str] | None) -> str:
    return "unknown" if names is None else ", ".join(names) or "none"


def _change(word: str, old: Any, new: Any, name: str = "") -> str:
    word = name if name in ("torch", "triton") else word
    return f"{word} {_value(old)} → {_value(new)}"


def _value(value: Any) -> str:
    if value is None or value == "":
        return "(none)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


_SHOWN = 6  # settings that are named


def _shape_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, now = dict(_flat("", old)), dict(_flat("", new))
    names = _changed(before, now)
    told = [_change(name, before.get(name), now.get(name)) for name in names[:_SHOWN]]
    more = len(names) - _SHOWN
    return [*told, f"and {more} more settings"] if more > 0 else told or ["settings that shape the graphs changed"]


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [item for key in value for item in _flat(f"{prefix}.{key}" if prefix else str(key), value[key])]
    return [(prefix, value)]


# --- predicting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relative:
    """A cache of another key, with the snapshot that launches of that key take."""

    parts: KeyParts
    digest: str
    same_recipe: bool = False
    here: bool = True  # at the place, not only on the workstation

    @property
    def name(self) -> str:
        return f"{self.parts.digest}/{self.digest}"


@dataclass(frozen=True)
class Prediction:
    """What a launch will find in its cache. The snapshot, or the seed, is what its private copy is made from."""

    key: str
    parts: KeyParts
    predicted: str  # warm | cold | rebuild
    snapshot: str | None = None
    seed: str | None = None  # "<key>/<digest>" of a relative
    because: tuple[str, ...] = ()
    last_cold_seconds: float | None = None
    last_cold_at: float | None = None

    @property
    def used(self) -> str | None:
        """The snapshot that the run begins with, "<key>/<digest>"."""
        return self.seed if self.snapshot is None else f"{self.key}/{self.snapshot}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in launch.json, state.json and provenance.json."""
        found = {name: getattr(self, name) for name in ("key", "snapshot", "seed", "predicted")}
        found |= {"because": list(self.because), "last_cold_seconds": self.last_cold_seconds}
        return {**found, "last_cold_at": self.last_cold_at, "parts": self.parts.to_json()}


def nearest(parts: KeyParts, relatives: Sequence[Relative]) -> Relative | None:
    """The relative with the most equal parts: the same recipe's first, those at the place before others, then as
    given."""
    known = [one for one in relatives if one.parts.digest != parts.digest]
    if not known:
        return None

    def rank(one: Relative) -> tuple[bool, bool, int, bool]:
        differing = unequal(one.parts, parts)
        # one that can be begun from is worth more than one that is only talked of
        return (not seeds(one.parts, parts), not one.same_recipe, len(differing), not one.here)

    return min(known, key=rank)


def seeds(other: KeyParts, parts: KeyParts) -> bool:
    """Whether a run may begin with the other's cache: the same torch, triton, CUDA, GPUs and configuration."""
    return set(unequal(other, parts)) <= SEEDING


def predict(
    parts: KeyParts,
    snapshot: str | None,
    relatives: Sequence[Relative],
    *,
    last_cold: tuple[float, float] | None = None,
) -> Prediction:
    """What the trainer will find. `snapshot`: the digest that lies under this very key, or None. `last_cold`: the
    seconds of the last cold compile, and when it was."""
    seconds, at = last_cold if last_cold is not None else (None, None)
    key = parts.digest
    if snapshot is not None:
        return Prediction(key, parts, "warm", snapshot, None, (), seconds, at)
    near = nearest(parts, relatives)
    if near is None:
        why = "nothing was compiled for it yet" if seconds is None else "no cache of it is there any more"
        return Prediction(key, parts, "cold", None, None, (why,), seconds, at)
    because = tuple(differences(near.parts, parts))
    if not seeds(near.parts, parts):
        return Prediction(key, parts, "cold", None, None, because, seconds, at)
    rebuilds = set(unequal(near.parts, parts)) <= REBUILDING
    # other shapes are other graphs, of which few may be the same: that is not worth bringing a cache along
    seed = near.name if near.here or rebuilds else None
    return Prediction(key, parts, "rebuild" if rebuilds else "cold", None, seed, because, seconds, at)
