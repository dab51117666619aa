"""Every part of a step is made once and eaten once by each variant, whatever the ranks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.topology import Balance, Topology, advice

COUNTS = st.integers(1, 5)
SPLITS = st.builds(
    Topology,
    mode=st.just("split"),
    targets=COUNTS,
    drafters=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    parts_per_rank=st.integers(1, 3),
)
COLOCATED = st.builds(Topology, drafters=st.tuples(COUNTS), parts_per_rank=st.integers(1, 3))


def trainers(topology: Topology, variant: int):
    return [topology.role(rank) for rank in topology.drafter_ranks(variant)]


@settings(deadline=None, max_examples=60)
@given(topology=st.one_of(SPLITS, COLOCATED))
def test_every_rank_has_one_role_and_every_variant_eats_every_part_once(topology):
    roles = [topology.role(rank) for rank in range(topology.world)]
    assert [role.rank for role in roles] == list(range(topology.world))
    targets = [role for role in roles if role.kind == "target"]
    assert [role.index for role in targets] == list(range(topology.targets if topology.mode == "split" else 0))
    listed = [rank for variant in range(len(topology.drafters)) for rank in topology.drafter_ranks(variant)]
    assert listed == [role.rank for role in roles if role.kind != "target"]
    for variant, count in enumerate(topology.drafters):
        ranks = trainers(topology, variant)
        assert [(role.variant, role.index) for role in ranks] == [(variant, index) for index in range(count)]
        parts = [topology.own_parts(role) for role in ranks]
        assert sorted(itertools.chain(*parts)) == list(range(topology.parts))
        assert len({len(own) for own in parts}) == 1  # each has as much to do
    with pytest.raises(ValueError, match="no rank"):
        topology.role(topology.world)


@settings(deadline=None, max_examples=60)
@given(topology=SPLITS, first=st.integers(0, 40), many=st.integers(0, 40))
def test_every_batch_is_made_once_and_those_who_eat_it_expect_it(topology, first, many):
    made = {target: list(topology.made_by(target, first, first + many)) for target in range(topology.targets)}
    assert sorted(itertools.chain(*made.values())) == list(range(first, first + many))
    for target, batches in made.items():
        assert batches == sorted(batches) and all(topology.maker(batch) == target for batch in batches)
    for batch in range(first, first + many):
        part = batch % topology.parts
        eaters = topology.eaters(batch)
        assert [topology.role(rank).variant for rank in eaters] == list(range(len(topology.drafters)))
        assert all(part in topology.own_parts(topology.role(rank)) for rank in eaters)


def test_a_split_of_the_users_own_shape():
    topology = Topology(mode="split", targets=5, drafters=(3,))
    assert topology.world == 8 and topology.parts == 3
    assert topology.drafter_ranks(0) == [5, 6, 7] and topology.role(6).index == 1
    assert list(topology.made_by(1, 0, 12)) == [1, 6, 11] and topology.eaters(11) == [7]


@settings(deadline=None, max_examples=40)
@given(make=st.floats(0.01, 10), eat=st.floats(0.01, 10), ranks=st.integers(2, 9))
def test_no_split_is_faster_than_the_best(make, eat, ranks):
    balance = Balance(make=make, eat=eat)
    best = balance.best(ranks)
    assert sum(best) == ranks and min(best) >= 1
    assert all(balance.rate(t, ranks - t) <= balance.rate(*best) for t in range(1, ranks))
    assert not advice(balance, *best)


def test_advice_names_the_faster_split():
    said = advice(Balance(make=1.0, eat=3.0), 2, 2)  # drafters are the bottleneck: 2 / 3 a second against 1 with 1:3
    assert "1 targets and 3 drafters would be 50% faster than 2 and 2" in said
    assert advice(Balance(make=1.0, eat=1.02), 2, 2) == ""


@settings(deadline=None, max_examples=100)
@given(topology=st.one_of(SPLITS, COLOCATED), data=st.data())
def test_on_fewer_ranks_every_part_is_still_eaten_once_by_each_variant(topology, data):
    least = len(topology.drafters) + (topology.mode == "split")
    ranks = data.draw(st.integers(least, topology.world))
    fewer = topology.on(ranks)
    assert fewer.world == ranks and fewer.parts == topology.parts
    if ranks == topology.world:
        assert (fewer.targets, fewer.drafters, fewer.even) == (topology.targets, topology.drafters, True)
    for variant, count in enumerate(fewer.drafters):
        parts = [fewer.own_parts(role) for role in trainers(fewer, variant)]
        assert sorted(itertools.chain(*parts)) == list(range(fewer.parts))
        assert max(map(len, parts)) - min(map(len, parts)) <= (fewer.parts % count > 0) and all(parts)
    for batch in range(3 * fewer.parts):
        expecting = [fewer.role(rank) for rank in fewer.eaters(batch)]
        assert [role.variant for role in expecting] == list(range(len(fewer.drafters)))
        assert all(batch % fewer.parts in fewer.own_parts(role) for role in expecting)


def test_fewer_ranks_keep_the_shares_of_targets_and_drafters():
    topology = Topology(mode="split", targets=5, drafters=(3,))
    assert [(each.targets, *each.drafters) for each in map(topology.on, (8, 5, 3, 2))] == [
        (5, 3),
        (3, 2),
        (2, 1),
        (1, 1),
    ]
    for ranks in (1, 9):
        with pytest.raises(ValueError, match="it has 8 ranks, and can do with 2 to 8 of them"):
            topology.on(ranks)


def test_a_sharded_drafter_needs_equal_numbers_of_parts():
    import torch

    from trainer.errors import TrainerError
    from trainer.spread import _must_be_even
    from trainer.world import World

    for ranks, even in ((2, False), (3, True), (1, True)):
        fewer = Topology(drafters=(3,)).on(ranks)
        world = World(topology=fewer, role=fewer.role(0), device=torch.device("cpu"), timeout=1.0)
        if even:
            _must_be_even(world)
        else:
            with pytest.raises(TrainerError, match="the 3 parts of a step are no equal shares for the 2 ranks left"):
                _must_be_even(world)


def test_a_drafter_that_is_asked_to_stop_takes_the_step_that_another_is_in_already():
    """Which waits for it: a target sends what all have asked for."""
    import torch
    import torch.distributed as dist

    from trainer.world import World

    topology, store = Topology(mode="split", targets=1, drafters=(1, 1)), dist.HashStore()
    behind, ahead = (
        World(topology=topology, role=topology.role(rank), device=torch.device("cpu"), timeout=5.0, store=store)
        for rank in (1, 2)
    )
    behind.begin_step(5)
    ahead.begin_step(6)
    assert behind.last_step(5) is None
    behind.begin_step(6)
    assert ahead.last_step(6) == behind.last_step(6) == 6
