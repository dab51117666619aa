"""What follows from a reading of a host's GPUs: who gets which, who is in the way, and what is not known."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.bundled import bundled_dir
from orchestrator.gpus import read, step, words
from orchestrator.gpus.decide import NotThere, decide, holders, ranks, visible, wanted_by
from orchestrator.gpus.model import IDLE, Chosen, Claim, Claimed, Conflict, Process, Reading, Wanted
from orchestrator.gpus.survey import HostReport
from orchestrator.run import Gpu
from orchestrator.view.gpus import lines
from trainer import config as trainer_config

EXAMPLES = settings(max_examples=150, deadline=None)


def gpu(index: int, used: float | None = 0.0, uuid: str | None = "") -> Gpu:
    uuid = f"GPU-{index:08x}" if uuid == "" else uuid
    return Gpu(index, "NVIDIA H200", uuid, used, 143771.0, 0.0, 30.0, 76.5)


def claim(run: str, *indices: int, owner: str = "201", alive: str = "runs") -> Claim:
    uuids = tuple(f"GPU-{index:08x}" for index in indices)
    return Claim(run, f"pve/{owner}", owner, "me", "desk", 1.0, uuids, alive)


RUNS = st.sampled_from(["mine", "other", "third"])
OWNERS = st.sampled_from(["200", "201"])
INDICES = st.lists(st.integers(0, 5), max_size=3, unique=True)


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    count = draw(st.integers(1, 6))
    used = st.sampled_from([None, 0.0, IDLE, IDLE + 1, 70000.0])
    process = st.builds(
        Process,
        pid=st.integers(1, 99),
        uuid=st.integers(0, 5).map(lambda n: f"GPU-{n:08x}"),
        owner=st.none() | OWNERS,
        run=st.none() | RUNS,
    )
    return Reading(
        gpus=tuple(gpu(n, draw(used)) for n in range(count)),
        processes=tuple(draw(st.lists(process, max_size=3))),
        claims=tuple(
            claim(draw(RUNS), *indices, owner=draw(OWNERS))
            for indices in draw(st.lists(INDICES, max_size=3))
            if indices
        ),
        own="200",
    )


WANTED = st.one_of(
    st.just(Wanted(all=True)),
    st.builds(Wanted, count=st.integers(1, 7), at_most=st.booleans()),
    st.builds(Wanted, named=st.lists(st.integers(0, 6).map(str), min_size=1, max_size=3, unique=True).map(tuple)),
)


@given(WANTED, readings(), st.booleans())
@EXAMPLES
def test_nobody_gets_what_another_has_unless_asked_to_share(wanted: Wanted, reading: Reading, share: bool) -> None:
    free = {one.uuid for one in reading.gpus if not holders(one, reading, "mine")}
    try:
        found = decide(wanted, reading, "mine", share=share)
    except NotThere:
        assert wanted.count > len(reading.gpus) or "6" in wanted.named or wanted.named
        return
    if isinstance(found, Conflict):
        assert not share and found.held and not {one.gpu.uuid for one in found.held} & free
        assert wanted.count == 0 or len(free) < wanted.count
        assert words.conflict("pve/200", found).count("\n") == 0
        return
    got = {one.uuid for one in found.gpus}
    assert len(got) == len(found.gpus) == ((wanted.count and min(wanted.count, len(reading.gpus))) or len(got))
    assert {one.gpu.uuid for one in found.held} == got - free and (share or got <= free)
    assert not wanted.all or got == {one.uuid for one in reading.gpus}
    # free ones first
    assert not (wanted.count and found.held) or free <= got


@given(readings())
@EXAMPLES
def test_each_holder_is_told_once_and_never_this_run_in_its_own_container(reading: Reading) -> None:
    for one in reading.gpus:
        found = holders(one, reading, "mine")
        assert not any(h.claim and (h.claim.run, h.claim.owner) == ("mine", "200") for h in found)
        assert not any(h.process and (h.process.run, h.process.owner) == ("mine", "200") for h in found)
        ghosts = [h for h in found if h.ghost is not None]
        on_it = [process for process in reading.processes if process.uuid == one.uuid]
        assert len(ghosts) == (not on_it and (one.memory_used or 0) > IDLE)
    report = HostReport("pve", reading)
    assert max(map(len, lines(report, 80))) <= 80
    assert len(report.to_json()["gpus"]) == len(reading.gpus)


def test_the_same_run_in_another_container_is_another_holder() -> None:
    reading = Reading((gpu(0),), claims=(claim("mine", 0, owner="201"),), own="200")
    assert isinstance(decide(Wanted(all=True), reading, "mine"), Conflict)
    reading = Reading((gpu(0),), claims=(claim("mine", 0, owner="200"),), own="200")
    assert isinstance(decide(Wanted(all=True), reading, "mine"), Chosen)


def test_only_what_the_place_has_is_taken_and_by_its_own_numbers_where_these_are_meant() -> None:
    reading = Reading(tuple(map(gpu, range(4))))
    place = [gpu(0, uuid="GPU-00000002"), gpu(1, uuid="GPU-00000003")]
    chosen = decide(Wanted(all=True), reading, "mine", place)
    assert isinstance(chosen, Chosen) and [one.index for one in chosen.gpus] == [2, 3] and chosen.all
    own = decide(Wanted(named=("1",), whose="place"), reading, "mine", place)
    assert isinstance(own, Chosen) and [one.index for one in own.gpus] == [3] and not own.all
    assert Claimed(own.gpus, own.all).visible == "GPU-00000003" and Claimed(chosen.gpus, True).visible is None
    host = decide(Wanted(named=("2", "GPU-00000003")), reading, "mine", place)
    assert isinstance(host, Chosen) and [one.index for one in host.gpus] == [2, 3]
    with pytest.raises(NotThere, match="GPU 0, and those that can be claimed there are 2, 3"):
        decide(Wanted(named=("0",)), reading, "mine", place)
    with pytest.raises(NotThere, match="GPU-0000 is the beginning of several UUIDs there, those of GPUs 2-3"):
        decide(Wanted(named=("GPU-0000",)), reading, "mine", place)
    # one that is lost has no UUID: it is not claimed, and the run is told which the others are
    lost = Reading((gpu(0), gpu(1, uuid=None)))
    rest = decide(Wanted(all=True), lost, "mine")
    assert isinstance(rest, Chosen) and not rest.all and [one.index for one in rest.gpus] == [0]


@pytest.mark.parametrize(
    ("said", "env", "trainer", "cpu", "wanted"),
    [
        ("all", {}, {}, True, Wanted(all=True)),
        ("none", {}, None, False, Wanted()),
        ("2", {}, None, False, Wanted(count=2)),
        (["0", "GPU-ab12"], {}, None, False, Wanted(named=("0", "GPU-ab12"))),
        (None, {}, None, True, Wanted()),
        (None, {}, None, False, Wanted(all=True)),
        (None, {}, {}, False, Wanted(count=1, at_most=True)),
        (None, {}, {"device": "cpu"}, False, Wanted()),
        (None, {}, {"device": "cuda:3"}, False, Wanted(all=True)),
        (None, {}, {"topology": {"mode": "split", "targets": 5, "drafters": 3}}, False, Wanted(count=8, at_most=True)),
        (
            None,
            {},
            {"topology": {"mode": "split", "targets": 2}, "drafters": [{"ranks": 2}, {}]},
            False,
            Wanted(count=5, at_most=True),
        ),
        (None, {"CUDA_VISIBLE_DEVICES": "3, 1"}, {}, True, Wanted(named=("3", "1"), whose="place")),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, {}, False, Wanted(named=(), whose="place")),
    ],
)
def test_what_a_recipe_wants(said, env, trainer, cpu, wanted) -> None:
    found = wanted_by(said, env, trainer, cpu=cpu)
    assert found == wanted
    assert found.none == (wanted == Wanted() or env.get("CUDA_VISIBLE_DEVICES") == "-1")


def test_gpus_of_which_none_can_be_claimed_are_not_said_to_be() -> None:
    launch = SimpleNamespace(place=SimpleNamespace(name="pve/200"))
    for place in ([gpu(0, uuid=None)], [gpu(0, uuid="GPU-of-another-view")]):
        why = step._unknown(launch, Wanted(all=True), Reading((gpu(0),)), place, "")
        assert why == "no GPU that pve/200 shows has a UUID that its host shows too"
    assert step._unknown(launch, Wanted(all=True), Reading((gpu(0, uuid=None),)), None, "").endswith("has a UUID")
    assert step._unknown(launch, Wanted(all=True), Reading((gpu(0),)), [gpu(3, uuid=gpu(0).uuid)], "") == ""


def test_what_is_no_device_ends_cudas_list() -> None:
    assert visible("0,GPU-ab,-1,2") == ("0", "GPU-ab") and visible("") == ()
    assert visible("1,²") == ("1",) and visible("0," + "9" * 5000) == ("0",)  # which are digits, and no int
    assert visible("0 1,+2,3gpu,x") == ("0", "2", "3")  # as CUDA reads them


def facts(**more: list[str]) -> dict[str, list[str]]:
    rows = [f"{n}, GPU-{n:08x}, 0, 143771, 0, 30, 76.50, NVIDIA H200" for n in range(2)]
    return {"gpus.status": ["0"], "gpus.gpu": rows, "gpus.apps": ["0"], "gpus.own": ["200"], "gpus.done": ["1"]} | {
        f"gpus.{key}": value for key, value in more.items()
    }


def test_a_reading_has_claims_and_processes_with_their_owners() -> None:
    line = "GPU-00000001, 4711, 1000"
    told = read.reading(
        facts(
            app=[line, ""],
            process=["4711 201 root exp-1 python train.py --a b", "² 201 root exp-1 no pid"],
            claim=[
                *(f"1 {text}" for text in ("run exp-1", "place pve/201", "owner 201", "user me", "since 12")),
                "1 uuids GPU-00000000 GPU-00000001",
                "1 alive runs",
                "2 run half",
            ],
        )
    )
    assert told.problem == "" and [one.index for one in told.gpus] == [0, 1]
    (process,) = told.processes
    assert (process.pid, process.owner, process.run, process.memory) == (4711, "201", "exp-1", 1000)
    assert process.command == "python train.py --a b"
    (one,) = told.claims  # the other says no GPUs
    assert (one.run, one.owner, one.since, one.uuids) == ("exp-1", "201", 12, ("GPU-00000000", "GPU-00000001"))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"status": ["124"], "gpu": []}, "no answer in 5 s"),
        ({"status": ["9"], "gpu": ["NVIDIA-SMI has failed"]}, "NVIDIA-SMI has failed"),
        ({"gpu": ["0, GPU-1, 0, 1, 0, 30, 1, H200", "\x1b[2Jfoo"]}, "also said"),
        ({"unread": ["nvidia-smi it is not there"], "status": []}, "there is no nvidia-smi"),
    ],
)
def test_what_was_not_read_is_a_problem_and_no_free_gpu(more, problem) -> None:
    told = read.reading(facts(**more))
    assert problem in told.problem and told.gpus == () and "\x1b" not in told.problem
    assert read.reading(facts(), whole=False).problem == "the host's answer was cut off"


def test_a_warning_behind_a_whole_answer_hides_nothing() -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:0B:00.0"
    given = facts(status=["14"], apps=["14"], app=["GPU-00000001, 4711, 1000", warning])
    given["gpus.gpu"].append(warning)
    told = read.reading(given)
    assert told.problem == told.apps_problem == "" and len(told.gpus) == 2
    assert [process.pid for process in told.processes] == [4711]


@given(st.dictionaries(st.sampled_from(["gpu", "app", "apps", "process", "claim", "status", "time", "own"]),
                       st.lists(st.text(max_size=40), min_size=1, max_size=4), max_size=8))  # fmt: skip
@EXAMPLES
def test_whatever_a_host_says_is_read_without_an_error(more: dict[str, list[str]]) -> None:
    told = read.reading(facts(**more))
    assert told.problem or told.gpus
    assert lines(HostReport("pve", told), 80)


def test_a_claim_stays_short_enough_to_be_read() -> None:
    sent: list[bytes] = []
    said = [b"N gpus.done 1\n", b"N gpus.taken 1\nN gpus.free 1\n"]
    channel = SimpleNamespace(send=sent.append, read=lambda seconds: said.pop(0))
    asked = read.Asked(SimpleNamespace(), channel, "N")
    uuids = " ".join(f"GPU-{number:036}" for number in range(64))
    assert (
        asked.take({"user": "\N{GREEK SMALL LETTER OMEGA}" * 9000, "workstation": "a\nend\x1b", "uuids": uuids}) == ""
    )
    text = b"".join(sent).decode()
    assert len(text.encode()) < 4096 and f"\nuuids {uuids}\n" in text
    assert text.startswith("take\n") and text.endswith("\nend\n") and text.count("\n") == 5 and "\x1b" not in text


def test_the_script_is_one_that_a_plain_shell_takes() -> None:
    assert read.script().startswith("owner_of() {")
    subprocess.run(["sh", "-n", "-c", read.script()], check=True, timeout=10)


def test_numbers_in_words() -> None:
    assert words.numbers([gpu(0)]) == "GPU 0" and words.numbers([gpu(n) for n in (0, 1, 2, 7)]) == "GPUs 0-2, 7"


TWO = [{"name": "a", "ranks": 2}, {"name": "b"}]


@pytest.mark.parametrize(
    "more",
    [
        {"topology": {}},
        {"topology": {"ranks": 4}},
        {"topology": {"mode": "split", "targets": 5, "drafters": 3}},
        {"topology": {"mode": "split", "targets": 2}, "drafters": TWO},
    ],
)
def test_ranks_are_counted_as_the_trainer_counts_them(tmp_path, more) -> None:
    recipe = yaml.safe_load((bundled_dir() / "recipes/exp-ddtree-fresh.yaml").read_text())
    given = {**recipe["settings"], **more}
    given["data"]["rows_per_step"] = 12
    given["data"]["paths"], given["target"]["path"] = str(tmp_path / "config.json"), str(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 36, "vocab_size": 151936}')
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(given))
    assert trainer_config.load(tmp_path / "trainer.yaml").whole_plan.world == ranks(given)
