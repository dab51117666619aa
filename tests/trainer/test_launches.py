"""Launches of a target rank and two drafter ranks that compile come to their tenth step, with an empty compile cache
and with a filled one; and the benchmark says so only of those that do."""

import json

import pytest

from benchmarks import launches
from benchmarks.launches import WARM_UP, Launch


def test_cold_and_warm_launches_come_to_their_steps(tmp_path, capsys):
    code = launches.main(["--tries", "2", "--strict", "--json", str(tmp_path / "all.json")])
    said = capsys.readouterr().out
    assert code == 0, said
    tries = json.loads((tmp_path / "all.json").read_text())
    assert {kind: [each["outcome"] for each in found] for kind, found in tries.items()} == {
        "cold": ["ok", "ok"],
        "warm": ["ok", "ok"],
    }


@pytest.mark.parametrize(
    ("code", "steps", "warm_up", "cold", "outcome"),
    [
        (0, 10, "1 hits, 1 misses", True, "ok"),
        (0, 10, "2 hits, 0 misses", False, "ok"),
        (0, 10, "0 hits, 2 misses", False, "not from the cache"),
        (0, 10, "", True, "nothing compiled"),
        (0, 9, "0 hits, 2 misses", True, "only 9 steps"),
        (1, 10, "0 hits, 2 misses", True, "exit 1"),
        (None, 10, "0 hits, 2 misses", True, "hang"),
    ],
)
def test_what_a_launch_counts_as(tmp_path, code, steps, warm_up, cold, outcome):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(steps)))
    found = WARM_UP.search(f"warm-up: compiled in 2 s (compile cache: {warm_up})")
    assert launches._outcome(code, tmp_path, found, cold=cold) == outcome


def test_the_table_counts_them():
    said = launches.table({"cold": [Launch("ok", 3.0, ""), Launch("hang", 9.0, "")], "warm": [Launch("ok", 2.0, "")]})
    assert said.splitlines()[1].split() == ["cold", "2", "1", "1", "6.0s", "9.0s", "hang"]
    assert said.splitlines()[2].split() == ["warm", "1", "1", "0", "2.0s", "2.0s"]
