"""What every policy promises, whatever is lost: property tests over both."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.workload import POLICIES, Plan, Policy, get_policy

every_policy = pytest.mark.parametrize("name", POLICIES)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """(G, alive sets): the start, then one smaller set per loss; G below, at, or above the replicas."""
    alive = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=17)))
    sets = [alive]
    while len(alive) > 1 and draw(st.integers(0, 4)):
        gone = draw(st.sets(st.sampled_from(alive), min_size=1, max_size=min(len(alive) - 1, 5)))
        alive = [r for r in alive if r not in gone]
        sets.append(alive)
    return draw(st.integers(1, 80)), sets


def follow(policy: Policy, num_microbatches: int, sets: list[list[int]]) -> list[Plan]:
    plans = [policy.assign(num_microbatches, sets[0])]
    for alive in sets[1:]:
        plans.append(policy.reassign(plans[-1], alive))
    return plans


def check_every_id_once(plan: Plan, num_microbatches: int, alive: list[int]) -> None:
    """By itself, so that it holds even if the plan's own check is ever taken out."""
    assert plan.alive == tuple(alive) == tuple(plan.ids) == tuple(plan.roles)
    assert sorted(i for r in alive for i in plan.ids_of(r)) == list(range(num_microbatches))


@every_policy
@given(histories())
def test_every_id_once_and_survivors_keep_their_prefix(
    name: str, history: tuple[int, list[list[int]]]
) -> None:
    count, sets = history
    plans = follow(get_policy(name), count, sets)
    for plan, alive in zip(plans, sets, strict=True):
        check_every_id_once(plan, count, alive)
    for before, after in pairwise(plans):
        for r in after.alive:
            assert after.ids_of(r)[: len(before.ids_of(r))] == before.ids_of(r)


@every_policy
@given(st.integers(1, 40), st.permutations(range(9)))
def test_one_by_one_down_to_the_last_replica(name: str, count: int, order: list[int]) -> None:
    sets = [sorted(order[k:]) for k in range(len(order))]
    plans = follow(get_policy(name, 9), count, sets)
    assert sorted(plans[-1].ids_of(order[-1])) == list(range(count))


class Index:
    """An integer of another library, as a numpy scalar is."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@every_policy
@given(histories(), st.randoms(use_true_random=False))
def test_order_and_container_do_not_matter(
    name: str, history: tuple[int, list[list[int]]], rng: random.Random
) -> None:
    count, sets = history

    def shuffled(alive: list[int]) -> list[int]:
        return rng.sample(alive, len(alive))

    others: list[list[Iterable[int]]] = [
        [set(shuffled(alive)) for alive in sets],
        [tuple(shuffled(alive)) for alive in sets],
        [dict.fromkeys(shuffled(alive)) for alive in sets],
        [(Index(r) for r in shuffled(alive)) for alive in sets],  # type: ignore[misc]
    ]
    plans = follow(get_policy(name), count, sets)
    for given_sets in others:
        policy = get_policy(name, 41)
        mine = policy.assign(count, given_sets[0])
        for k, alive in enumerate(given_sets[1:]):
            assert mine == plans[k]
            mine = policy.reassign(mine, alive)
        assert mine == plans[-1]
        assert mine.digest() == plans[-1].digest()


@every_policy
def test_earlier_calls_leave_no_trace(name: str) -> None:
    used, fresh = get_policy(name, 6), get_policy(name, 6)
    for count in (7, 48, 3):
        used.reassign(used.assign(count, range(6)), [1, 4])
    assert used.assign(20, range(6)) == fresh.assign(20, range(6))
    assert used == fresh


@every_policy
@given(st.integers(1, 30), st.integers(1, 12))
def test_divisible_start_is_what_vanilla_megatron_does(name: str, per_replica: int, replicas: int) -> None:
    plan = get_policy(name).assign(per_replica * replicas, range(replicas))
    for r in range(replicas):
        assert plan.ids_of(r) == tuple(k * replicas + r for k in range(per_replica))


@every_policy
@given(st.integers(1, 80), st.integers(1, 20))
def test_no_start_is_longer_than_it_must_be(name: str, count: int, replicas: int) -> None:
    plan = get_policy(name).assign(count, range(replicas))
    assert max(len(plan.ids_of(r)) for r in plan.alive) == -(-count // replicas)


@given(histories())
def test_balanced_quotas_differ_by_at_most_one(history: tuple[int, list[list[int]]]) -> None:
    count, sets = history
    for plan in follow(get_policy("balanced"), count, sets):
        quotas = [len(plan.ids_of(r)) for r in plan.alive]
        assert max(quotas) - min(quotas) <= 1
        assert set(plan.roles.values()) == {"worker"}


def test_balanced_example() -> None:
    policy = get_policy("balanced", 4)
    plan = policy.assign(10, range(4))
    assert dict(plan.ids) == {0: (0, 4, 8), 1: (1, 5, 9), 2: (2, 6), 3: (3, 7)}
    plan = policy.reassign(plan, {0, 2, 3})
    # Lost 1, 5, 9: to replica 2 and 3, which have two, then to replica 0, the lowest of those with three.
    assert dict(plan.ids) == {0: (0, 4, 8, 9), 2: (2, 6, 1), 3: (3, 7, 5)}
    plan = policy.reassign(plan, [3])
    assert plan.ids_of(3) == (3, 7, 5, 0, 1, 2, 4, 6, 8, 9)


@every_policy
def test_wrong_arguments_are_refused(name: str) -> None:
    policy = get_policy(name, 4)
    plan = policy.assign(6, (0, 1, 3))
    assert policy.reassign(plan, (3, 1, 0)) is plan
    for alive, message in [
        ([], "no replica is alive"),
        ([1, 2], r"\[2\] are not part of the plan"),
        ([1, 1], "named twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            policy.reassign(plan, alive)
    for alive, message in [
        ([], "no replica is alive"),
        ([1, 4], "no such replica"),
        ([-1, 2], "no such replica"),
        ([2, 2], "named twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            policy.assign(6, alive)
    with pytest.raises(ValueError, match="at least one microbatch"):
        policy.assign(0, [1])
