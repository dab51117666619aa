"""The key of a compile cache: what changes it and what does not, what differs in words, and what is predicted."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.compile_cache import words
from orchestrator.compile_cache.key import (
    REBUILDING,
    SEEDING,
    SHAPELESS,
    KeyParts,
    Relative,
    changes_key,
    differences,
    parts_of,
    predict,
    seeds,
    shapes_of,
    unequal,
)
from orchestrator.remote import cache_files

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
NAMES = st.lists(TEXT, max_size=3, unique=True).map(lambda names: tuple(sorted(names)))
SETTINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.builds(
    KeyParts,
    torch=st.sampled_from(["2.11.0+cu128", "2.13.0", "none"]),
    torch_files=TEXT,
    triton=st.sampled_from(["3.5.1", "3.6.0"]),
    triton_files=TEXT,
    cuda=st.sampled_from(["12.8", "cpu"]),
    gpu=NAMES,
    config=st.dictionaries(TEXT, TEXT, max_size=3),
    shapes=st.dictionaries(TEXT, SETTINGS, max_size=3).map(lambda told: shapes_of(told, None)),
    environment_path=TEXT,
    instruction_set=NAMES,
)

BASE = KeyParts(
    torch="2.11.0+cu128",
    torch_files="a" * 16,
    triton="3.5.1",
    triton_files="b" * 16,
    cuda="12.8",
    gpu=("NVIDIA H200",),
    config={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
    shapes=shapes_of({"data": {"row_length": 256}}, None),
    environment_path="",
    instruction_set=(),
)
CHANGED = {
    "torch": ("2.11.1+cu128", "torch 2.11.0+cu128 → 2.11.1+cu128"),
    "torch_files": ("c" * 16, "torch's files changed (2.11.0+cu128 as before)"),
    "triton": ("3.6.0", "triton 3.5.1 → 3.6.0"),
    "triton_files": ("c" * 16, "triton's files changed (3.5.1 as before)"),
    "cuda": ("13.0", "CUDA 12.8 → 13.0"),
    "gpu": (("NVIDIA B200",), "GPU NVIDIA H200 → NVIDIA B200"),
    "config": ({}, "TORCHINDUCTOR_MAX_AUTOTUNE 1 → (none)"),
    "shapes": (shapes_of({"data": {"row_length": 512}}, None), "data.row_length 256 → 512"),
    "environment_path": ("/srv/envs/1", "environment (none) → /srv/envs/1"),
    "instruction_set": (("avx2",), "instruction set none → avx2"),
}


@settings(deadline=None, max_examples=60)
@given(PARTS)
def test_both_ends_of_the_wire_come_to_the_same_key(parts):
    travelled = json.loads(json.dumps(parts.to_json()))
    assert KeyParts.read(travelled) == parts
    assert cache_files.key_of(travelled) == parts.digest == KeyParts.read(travelled).digest
    assert cache_files.KEY.match(parts.digest)


@settings(deadline=None, max_examples=60)
@given(PARTS, PARTS)
def test_keys_differ_just_where_parts_do_and_every_difference_is_told(a, b):
    assert (a.digest == b.digest) == (unequal(a, b) == [])
    assert bool(differences(a, b)) == bool(unequal(a, b))
    assert len(differences(a, b)) >= len(set(unequal(a, b)) - {"torch_files", "triton_files"})


@pytest.mark.parametrize("name", [field.name for field in fields(KeyParts)])
def test_each_part_changes_the_key_and_is_predicted_by_name(name):
    value, sentence = CHANGED[name]
    now = replace(BASE, **{name: value})
    assert now.digest != BASE.digest and differences(BASE, now) == [sentence]
    told = predict(now, None, [Relative(BASE, "d" * 16, same_recipe=True)], last_cold=(372.0, 1.0))
    assert told.because == (sentence,) and told.predicted == ("rebuild" if name in REBUILDING else "cold")
    # another torch's, triton's, GPU's or configuration's cache is never begun from
    assert told.seed == (f"{BASE.digest}/{'d' * 16}" if name in SEEDING else None)
    assert sentence in words.expected(told) and "last cold compile took 6 m 12 s" in words.expected(told)


def test_another_version_is_told_once_and_not_by_its_files_as_well():
    now = replace(BASE, triton="3.6.0", triton_files="c" * 16)
    assert differences(BASE, now) == ["triton 3.5.1 → 3.6.0"]


def test_what_changes_no_graph_is_no_part():
    """The driver, the user, where the code lies and how the trainer trains: only the graphs count."""
    manifest = {"torch": {"version": "2.13.0+cpu", "cuda": None}, "triton": None}
    settings_of = {"name": "a", "steps": 9, "optimizer": {"clip": 0}, "data": {"paths": "/x", "row_length": 256}}
    run = {"variables": {}, "command": None, "cpus": 2}
    parts = parts_of(manifest, settings=settings_of, **run)
    other = {"name": "b", "steps": 1, "seed": 5, "evaluate": {"every": 3}, "data": {"paths": "/y", "row_length": 256}}
    variables = {"TORCHINDUCTOR_CACHE_DIR": "/c", "TORCHINDUCTOR_COMPILE_THREADS": "4", "HOME": "/h"}
    assert parts_of(manifest, settings=other, **{**run, "variables": variables}).digest == parts.digest
    assert (parts.triton, parts.cuda, parts.torch) == ("none", "cpu", "2.13.0+cpu")
    assert parts.shapes["settings"] == {"data": {"row_length": 256}}
    longer = {**settings_of, "data": {"row_length": 512}}
    assert parts_of(manifest, settings=longer, **run).digest != parts.digest
    assert parts_of(manifest, settings=settings_of, **{**run, "cpus": 4}).digest != parts.digest
    assert parts_of(manifest, settings=settings_of, **{**run, "command": ["x"]}).digest != parts.digest


def test_without_a_use_for_gpus_those_of_the_place_are_no_part():
    """A CPU build of torch, or a trainer that is told so, compiles C++ also where there are GPUs. Of a program of the
    user's own only the place can tell."""

    def gpu(cuda, device, command=None):
        manifest = {"torch": {"version": "2.13.0", "cuda": cuda}, "triton": None}
        return parts_of(manifest, variables={}, settings={"device": device}, command=command, cpus=2).gpu

    assert gpu(None, "auto") == gpu(None, "auto", ["x"]) == gpu("12.8", "cpu") == ()
    assert gpu("12.8", "auto") is gpu("12.8", "cpu", ["x"]) is None


def test_several_drafters_are_told_apart_by_what_shapes_them():
    def told(**first):
        return shapes_of({"drafters": [{"name": "a", **first}, {"name": "b"}]}, None)["settings"]

    assert told(seed=1, optimizer={"clip": 0}) == told() != told(drafter={"layers": 3})


def test_the_settings_that_shape_nothing_are_settings_of_the_trainer():
    """A name that the trainer does not know would be left out of no key."""
    from dataclasses import is_dataclass
    from typing import get_type_hints

    config = pytest.importorskip("trainer.config")
    for full in SHAPELESS:
        kind = config.Config
        for name in full.split("."):
            hints = get_type_hints(kind)
            assert name in hints, full
            kind = hints[name] if is_dataclass(hints[name]) else None


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("TORCH_COMPILE_DISABLE", True),
        ("TORCHDYNAMO_CACHE_SIZE_LIMIT", True),
        ("TRITON_ALLOW_TF32", True),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("TRITON_CACHE_DIR", False),
        ("TORCHINDUCTOR_COMPILE_THREADS", False),
        ("TORCHDYNAMO_VERBOSE", False),
        ("TORCH_LOGS", False),
        ("NCCL_DEBUG", False),
    ],
)
def test_variables_of_the_run_that_are_part_of_the_key(variable, counts):
    assert changes_key(variable) is counts


def test_the_very_key_is_warm_and_the_nearest_relative_explains_a_cold_one():
    assert predict(BASE, "d" * 16, [Relative(replace(BASE, triton="3.6.0"), "e" * 16)]).predicted == "warm"
    far = Relative(replace(BASE, torch="2.9", torch_files="x", triton="3.4"), "1" * 16, same_recipe=True)
    near = Relative(replace(BASE, triton="3.4"), "2" * 16, same_recipe=True)
    other = Relative(replace(BASE, cuda="13.0"), "3" * 16)
    seed = Relative(replace(BASE, shapes=shapes_of({}, None)), "4" * 16)
    assert predict(BASE, None, [far, other, near]).because == ("triton 3.4 → 3.5.1",)
    assert predict(BASE, None, [far, other, near, seed]).seed == seed.name
    assert predict(BASE, None, []).because == ("nothing was compiled for it yet",)
    assert predict(BASE, None, [], last_cold=(372.0, 1.0)).because == ("no cache of it is there any more",)


def test_a_cache_travels_as_a_seed_only_where_all_its_graphs_are_wanted():
    elsewhere = Relative(replace(BASE, environment_path="/a"), "5" * 16, here=False)
    assert predict(BASE, None, [elsewhere]).seed == elsewhere.name
    shaped = Relative(replace(BASE, shapes=shapes_of({}, None)), "6" * 16, here=False)
    assert predict(BASE, None, [shaped]).seed is None and predict(BASE, None, [shaped]).predicted == "cold"


@settings(deadline=None, max_examples=60)
@given(PARTS, st.lists(st.tuples(PARTS, st.booleans(), st.booleans()), max_size=4))
def test_no_run_begins_with_what_another_torch_wrote(parts, others):
    relatives = [Relative(one, f"{number:016x}", same, here) for number, (one, same, here) in enumerate(others)]
    told = predict(parts, None, relatives)
    assert told.snapshot is None and told.predicted in ("cold", "rebuild") and told.because
    if told.seed is not None:
        (one,) = [one for one in relatives if one.name == told.seed]
        assert (one.parts.torch, one.parts.torch_files, one.parts.triton_files) == (
            parts.torch,
            parts.torch_files,
            parts.triton_files,
        )
        assert seeds(one.parts, parts) and (one.parts.gpu, one.parts.config) == (parts.gpu, parts.config)


# --- in words --------------------------------------------------------------------------------------

COLD = {"predicted": "cold", "because": ["triton 3.5.1 → 3.6.0"], "last_cold_seconds": 372.0}
REBUILD = {"predicted": "rebuild", "because": ["environment /a → /b"]}
ASIDE = {"predicted": "warm", "moved_aside": {"snapshot": "a/b", "why": "file too short"}}
HITS, MISS = {"hits": 3, "misses": 0, "rebuilt": 0}, {"hits": 2, "misses": 1, "rebuilt": 1}


@pytest.mark.parametrize(
    ("cache", "found", "said"),
    [
        ({"predicted": "warm"}, HITS, "warm, 3 of 3 hits"),
        ({"predicted": "warm"}, None, "warm expected"),
        (COLD, MISS, "cold: 1 miss because triton 3.5.1 → 3.6.0; last cold compile took 6 m 12 s"),
        (COLD, None, "cold expected because triton 3.5.1 → 3.6.0; last cold compile took 6 m 12 s"),
        (REBUILD, {"hits": 2, "misses": 0, "rebuilt": 2}, "C++ rebuild: environment /a → /b; 2 of 2 hits"),
        (REBUILD, {}, "C++ rebuild expected because environment /a → /b"),
        ({"predicted": "warm"}, MISS, "cold: 1 miss, which its key did not predict"),
        (ASIDE, MISS, "cold: 1 miss, as its snapshot was moved aside"),
        (ASIDE, None, "cold expected, as its snapshot was moved aside"),
        ({"predicted": "warm"}, {"hits": 1, "rebuilt": 1}, "C++ rebuild, which its key did not predict; 1 of 1 hits"),
        (None, {"hits": 0, "misses": 2}, "cold: 2 misses"),
        (COLD, HITS, "warm, 3 of 3 hits"),
        (None, {"hits": 0, "misses": 0, "done": True}, "nothing to compile"),
        (None, None, ""),
        ({"predicted": "cold", "because": 7, "last_cold_seconds": float("nan")}, {"misses": "x"}, "cold expected"),
    ],
)
def test_what_status_says(cache, found, said):
    assert words.compiling(cache, found) == said


def test_what_is_told_afterwards():
    found = {**HITS, "seconds": 12.4, "new_files": 0}
    assert words.compiled({"predicted": "warm"}, found) == "compile cache: warm, 3 of 3 hits (12 s, 0 new files)"
    aside = {"moved_aside": {"snapshot": "a/b", "why": "c.so: file too short", "restarted": True}}
    (line,) = words.told(aside)
    assert "a/b was moved aside: c.so: file too short" in line and "once more" in line
