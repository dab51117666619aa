"""Batches from targets to drafters over wires of queues, on which a send waits until it is received: what would block
on any transport blocks here. All ranks are threads."""

import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import pipeline
from trainer.errors import TrainerError
from trainer.pipeline import STOP, Parcel, Receiver, Requests, Sender
from trainer.source import Streamed, _Turns
from trainer.topology import Topology
from trainer.world import World

LIMIT = 60  # seconds


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 3), length=st.integers(1, 4), features=st.integers(1, 5), hidden=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_parcel_is_one_buffer_that_its_parts_fill(rows, length, features, hidden, dtype):
    parcel = Parcel(rows=rows, length=length, features=features, hidden=hidden, dtype=dtype)
    buffer = parcel.empty(torch.device("cpu"))
    assert buffer.nbytes == parcel.bytes and buffer.is_contiguous()
    buffer.zero_()
    last, part = parcel.split(buffer)
    assert part.shape == (rows, length, features)
    part += 1
    if hidden:
        assert last.shape == (rows, length, hidden)
        last += 1
    else:
        assert last is None
    assert (buffer == 1).all()  # each element belongs to one of them, once


class Wire:
    """In place of torch.distributed, for all ranks of one process: a group knows whose it is, and its wire. So a thread
    that outlives its test takes nothing of the next one's."""

    def __init__(self):
        self.channels: dict[tuple[int, int, int], queue.Queue] = {}
        self.lock = threading.Lock()

    def channel(self, *key: int) -> queue.Queue:
        with self.lock:
            return self.channels.setdefault(key, queue.Queue())

    def send(self, tensor, peer, *, group, tag=0):
        received = threading.Event()
        group.wire.channel(group.rank, peer, tag).put((tensor.clone(), received))
        assert received.wait(LIMIT)

    def recv(self, tensor, peer, *, group, tag=0):
        came, received = group.wire.channel(peer, group.rank, tag).get(timeout=LIMIT)
        tensor.copy_(came)
        received.set()

    def get_backend(self, group):
        return "gloo"


def world_of(topology: Topology, rank: int) -> World:
    role = topology.role(rank)
    pairs = [
        (target, drafter)
        for target in range(topology.targets)
        for drafter in range(topology.targets, topology.world)
        if rank in (target, drafter)
    ]
    groups = {pair: SimpleNamespace(rank=rank, wire=pipeline.dist) for pair in pairs}
    return World(topology=topology, role=role, device=torch.device("cpu"), timeout=LIMIT, control=groups, data=groups)


PARCEL = Parcel(rows=2, length=3, features=4, hidden=1, dtype=torch.float32)


def run_all(topology: Topology, *, steps: int, first: int, draws: int, ends: list[int]) -> dict[int, list[float]]:
    """Variant v trains steps first … ends[v]-1 of `steps`; -> what each drafter rank was given, by call."""
    data_steps = -(-steps // draws)
    given: dict[int, list[float]] = {}
    failures: list[BaseException] = []
    meeting = [threading.Barrier(count, timeout=LIMIT) for count in topology.drafters]

    def target(rank: int) -> None:
        sender = Sender(world_of(topology, rank), PARCEL)

        def make(batch: int, buffer: torch.Tensor) -> None:
            buffer.fill_(batch)

        sender.run(topology.made_by(rank, first // draws * topology.parts, data_steps * topology.parts), make, None)

    def drafter(rank: int) -> None:
        world = world_of(topology, rank)
        own = topology.own_parts(world.role)
        held = len(own) if draws > 1 else 1
        source = Streamed(
            receiver=Receiver(world=world, parcel=PARCEL, buffers=held + 1),
            turns=_Turns(own=own, draws=draws),
            parts=topology.parts,
            batches=data_steps * topology.parts,
            last=True,
        )
        source.start(first)
        given[rank] = []
        for _ in range(first, ends[world.role.variant]):
            for _ in own:
                last, features = source(None)
                assert (features == features[0, 0, 0]).all() and (last == features[0, 0, 0]).all()
                given[rank].append(float(features[0, 0, 0]))
            meeting[world.role.variant].wait()  # gradients are added up
        source.stop()

    def guarded(work, rank) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    works = [(target if rank < topology.targets else drafter, rank) for rank in range(topology.world)]
    threads = [threading.Thread(target=guarded, args=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads), "these wait for each other"
    return given


@st.composite
def jobs(draw):
    topology = Topology(
        mode="split",
        targets=draw(st.integers(1, 3)),
        drafters=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
        parts_per_rank=draw(st.integers(1, 2)),
    )
    steps, draws = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    first = draw(st.integers(0, steps - 1))
    ends = [draw(st.one_of(st.just(steps), st.integers(first, steps))) for _ in topology.drafters]
    return topology, {"steps": steps, "first": first, "draws": draws, "ends": ends}


@settings(deadline=None, max_examples=60)
@given(job=jobs())
def test_every_drafter_is_given_its_batches_and_may_end_at_any_step(job):
    """Also when it begins in the middle, of the run or of the draws of a batch."""
    topology, settings_ = job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "dist", Wire())
        given_ = run_all(topology, **settings_)
    for rank, came in given_.items():
        role = topology.role(rank)
        expected = [
            step // settings_["draws"] * topology.parts + part
            for step in range(settings_["first"], settings_["ends"][role.variant])
            for part in topology.own_parts(role)
        ]
        assert came == expected


@pytest.mark.parametrize(("make", "eat", "says"), [(4.0, 1.0, "2 targets and 1 drafters"), (1.0, 1.0, "")])
def test_a_better_split_is_advised_from_what_both_sides_took(make, eat, says, monkeypatch):
    world = world_of(Topology(mode="split", drafters=(2,)), 1)
    told: dict = {}
    monkeypatch.setattr(World, "peek", lambda _, name: told.get(name))
    receiver = Receiver(world=world, parcel=PARCEL)
    source = Streamed(receiver=receiver, turns=_Turns(own=[0], draws=1), parts=2, batches=2, last=True)
    assert source.waits() == {"waited_for_target": 0.0} and source.advice() == ""  # nothing is known
    told["waits/0"] = [make * 20, 30.0, 20]
    source.eating.extend([eat] * 19 + [1000.0])  # an evaluation in between
    assert source.waits()["targets_waited"] == 1.5
    assert says in source.advice() and bool(says) == bool(source.advice())


def requests_of(topology: Topology, wire: Wire, monkeypatch) -> tuple[Requests, SimpleNamespace]:
    monkeypatch.setattr(pipeline, "dist", wire)
    return Requests(world_of(topology, 0)), SimpleNamespace(rank=1, wire=wire)


def test_a_drafter_that_asks_out_of_turn_is_refused(monkeypatch):
    wire = Wire()
    requests, drafter = requests_of(Topology(mode="split"), wire, monkeypatch)
    wire.send(torch.tensor([7]), 0, group=drafter, tag=pipeline.ASK)
    with pytest.raises(TrainerError, match="rank 1 asks for batch 7, and its next one here is 3"):
        requests.await_batch(3, 1, None)


def test_what_is_no_batch_is_served_while_a_batch_is_awaited(monkeypatch):
    wire, served = Wire(), []
    requests, drafter = requests_of(Topology(mode="split"), wire, monkeypatch)
    for request in (pipeline.EVALUATE, 3, STOP):
        wire.send(torch.tensor([request]), 0, group=drafter, tag=pipeline.ASK)
    assert requests.await_batch(3, 1, lambda *asked: served.append(asked))
    assert served == [(1, pipeline.EVALUATE)]
    assert not requests.await_batch(4, 1, None)  # it has stopped
    requests.await_stops(None)


class Broken(Wire):
    """Connections that break when the drafter is to be heard, or sent to."""

    def __init__(self, at: str):
        super().__init__()
        self.at = at

    def recv(self, *arguments, group, **options):
        if self.at == "recv" and group.rank == 0:
            raise RuntimeError("Connection closed by peer")
        super().recv(*arguments, group=group, **options)

    def send(self, *arguments, group, **options):
        if self.at == "send" and group.rank == 0:
            raise RuntimeError("Connection closed by peer")
        super().send(*arguments, group=group, **options)


@pytest.mark.parametrize("at", ["recv", "send"])
def test_a_target_whose_connection_breaks_in_a_thread_of_it_does_not_wait_for_ever(monkeypatch, at):
    wire = Broken(at)
    monkeypatch.setattr(pipeline, "dist", wire)
    sender = Sender(world_of(Topology(mode="split"), 0), PARCEL)
    if at == "send":
        drafter = SimpleNamespace(rank=1, wire=wire)
        wire.send(torch.tensor([0]), 0, group=drafter, tag=pipeline.ASK)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            sender.run(iter(range(9)), lambda batch, buffer: None, None)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert "Connection closed" in str(caught[0])


def test_a_drafter_whose_connection_breaks_is_told(monkeypatch):
    wire = Broken("recv")
    monkeypatch.setattr(pipeline, "dist", wire)
    receiver = Receiver(world=world_of(Topology(mode="split"), 1), parcel=PARCEL)
    monkeypatch.setattr(wire, "recv", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("Connection closed by peer")))
    monkeypatch.setattr(wire, "send", lambda *_, **__: None)
    receiver.start(iter([0, 1]))
    with pytest.raises(RuntimeError, match="Connection closed"):
        receiver.take(0)
