"""The paper's policy: its worked example, its layout rule, and the cases that the paper gets wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.workload import Plan, get_policy

POLICY = get_policy("recover")


def quotas(plan: Plan) -> dict[int, int]:
    return {r: len(plan.ids_of(r)) for r in plan.alive}


def of_role(plan: Plan, role: str) -> list[int]:
    return [r for r in plan.alive if plan.roles[r] == role]


def without(plan: Plan, *lost: int) -> list[int]:
    return [r for r in plan.alive if r not in lost]


def start_of_31() -> Plan:
    """Figure 5 of the paper: majors 0-27 with 9 each, minor 28 with 4, major-spare 29, minor-spare 30."""
    return POLICY.assign(256, range(31))


def test_worked_example_of_the_paper() -> None:
    plan = POLICY.assign(256, range(32))
    assert Counter(plan.roles.values()) == {"major": 32}
    assert set(quotas(plan).values()) == {8}

    after = POLICY.reassign(plan, without(plan, 13))
    # 8 microbatches are lost, W=31: G_ext=1, and n_bdry = 31*1 - 8 = 23 take one less, so 8 do one more.
    assert Counter(after.roles.values()) == {"major": 8, "boundary-minor": 23}
    assert Counter(quotas(after).values()) == {9: 8, 8: 23}
    assert sorted(after.ids_of(r)[-1] for r in of_role(after, "major")) == list(plan.ids_of(13))

    after = POLICY.assign(256, after.alive)
    assert Counter(after.roles.values()) == {"major": 28, "minor": 1, "major-spare": 1, "minor-spare": 1}
    assert {(after.roles[r], n) for r, n in quotas(after).items()} == {
        ("major", 9),
        ("minor", 4),
        ("major-spare", 0),
        ("minor-spare", 0),
    }


@given(st.integers(1, 300), st.integers(1, 60))
def test_layout_rule(count: int, replicas: int) -> None:
    plan = POLICY.assign(count, range(replicas))
    roles = Counter(plan.roles.values())
    majors, minors = of_role(plan, "major"), of_role(plan, "minor")
    quota = len(plan.ids_of(majors[0]))
    assert replicas * quota >= count > replicas * (quota - 1)
    assert len(majors) == count // quota
    assert all(len(plan.ids_of(r)) == quota for r in majors)
    rest = count - len(majors) * quota
    assert [len(plan.ids_of(r)) for r in minors] == ([rest] if rest else [])
    spares = replicas - len(majors) - len(minors)
    assert roles["minor-spare"] == (1 if minors and spares >= 2 else 0)
    assert roles["major-spare"] == spares - roles["minor-spare"]
    assert [plan.roles[r] for r in range(replicas)] == sorted(
        plan.roles.values(), key=["major", "minor", "major-spare", "minor-spare"].index
    )


@given(st.integers(1, 300), st.integers(1, 60))
def test_major_quota_never_decreases(count: int, replicas: int) -> None:
    longest = [max(quotas(POLICY.assign(count, range(w))).values()) for w in range(replicas, 0, -1)]
    assert longest == sorted(longest)


@given(st.integers(1, 12), st.integers(1, 24), st.data())
def test_no_history_is_needed(initial: int, replicas: int, data: st.DataObject) -> None:
    """The paper's own state machine, roles and G_cur kept from iteration to iteration, ends at our G_cur.

    Written from algorithms 6 and 7 with the first hole closed: roles change by promotion, and G_cur and
    the layout are recomputed only after a boundary.
    """
    count, quota, roles = initial * replicas, initial, ["major"] * replicas
    while len(roles) > 1:
        assert max(quotas(POLICY.assign(count, range(len(roles)))).values()) == quota
        lost = data.draw(st.sets(st.integers(0, len(roles) - 1), min_size=1, max_size=min(3, len(roles) - 1)))
        gone = Counter(roles[k] for k in lost)
        left = Counter(role for k, role in enumerate(roles) if k not in lost)
        for role in ("major", "minor"):
            promoted = min(gone[role], left[role + "-spare"])
            left[role] += promoted
            left[role + "-spare"] -= promoted
            gone[role] -= promoted
        if gone["major"] or gone["minor"]:  # a boundary: advance
            alive = left.total()
            quota = next(g for g in range(quota, count + 1) if alive * g >= count)
            left = Counter({"major": count // quota, "minor": 1 if count % quota else 0})
            spares = alive - left.total()
            left["minor-spare"] = 1 if left["minor"] and spares >= 2 else 0
            left["major-spare"] = spares - left["minor-spare"]
        roles = sorted(left.elements())


def test_a_lost_major_is_replaced_by_one_major_spare() -> None:
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 5))
    assert after.roles[29] == "major"
    assert after.ids_of(29) == plan.ids_of(5)
    assert all(after.ids_of(r) == plan.ids_of(r) for r in after.alive if r != 29)
    assert after.roles[30] == "minor-spare"


def test_a_lost_minor_is_replaced_by_the_minor_spare() -> None:
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 28))
    assert after.roles[30] == "minor"
    assert after.ids_of(30) == plan.ids_of(28)
    assert after.roles[29] == "major-spare" and after.ids_of(29) == ()


def test_major_and_minor_lost_together() -> None:
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 0, 28))
    assert (after.roles[29], after.ids_of(29)) == ("major", plan.ids_of(0))
    assert (after.roles[30], after.ids_of(30)) == ("minor", plan.ids_of(28))


def test_a_lost_spare_changes_nothing() -> None:
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 29, 30))
    assert dict(after.ids) == {r: plan.ids_of(r) for r in after.alive}
    assert Counter(after.roles.values()) == {"major": 28, "minor": 1}


def test_two_majors_lost_with_one_major_spare() -> None:
    """The paper's predicate asks only whether there is a spare, and the batch ends short by G_cur."""
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 3, 4))
    # The spare of the other role is used as well, so nothing is left to spread: G_ext = 0.
    assert (after.roles[29], after.ids_of(29)) == ("major", plan.ids_of(3))
    assert (after.roles[30], after.ids_of(30)) == ("major", plan.ids_of(4))
    assert max(quotas(after).values()) == 9


def test_minor_and_its_spare_lost_uses_the_major_spare() -> None:
    """The paper counts 28*9 + 9 = 261 here, and forces G_ext >= 1 on top."""
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 28, 30))
    assert (after.roles[29], after.ids_of(29)) == ("minor", plan.ids_of(28))
    assert sum(quotas(after).values()) == 256
    assert max(quotas(after).values()) == 9


def test_what_the_spares_cannot_take_is_spread() -> None:
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 0, 1, 2, 28))
    # Majors 0 and 1 go to both spares; major 2 (9) and the minor (4) are left: D=13, W=27, G_ext=1.
    assert after.ids_of(29)[:9] == plan.ids_of(0)
    assert after.ids_of(30)[:9] == plan.ids_of(1)
    assert Counter(quotas(after).values()) == {10: 13, 9: 14}
    assert len(of_role(after, "boundary-minor")) == 27 - 13
    spread = sorted(i for r in after.alive for i in after.ids_of(r)[9:])
    assert spread == sorted(plan.ids_of(2) + plan.ids_of(28))


def test_two_losses_in_one_iteration() -> None:
    plan = start_of_31()
    after = POLICY.reassign(plan, without(plan, 0))
    # The promoted spare is lost in its turn; the major-spare is gone, the minor-spare is not.
    again = POLICY.reassign(after, without(after, 29))
    assert (again.roles[30], again.ids_of(30)) == ("major", plan.ids_of(0))
    # Without spares: 9 lost ids over 28 survivors, the minor (which has 4) first.
    last = POLICY.reassign(again, without(again, 30))
    assert last.roles[28] == "minor" and quotas(last)[28] == 5
    assert Counter(quotas(last).values()) == {10: 8, 9: 19, 5: 1}
    # And once more: a boundary minor that takes the full extra share is a major again.
    final = POLICY.reassign(last, without(last, 1))
    assert max(quotas(final).values()) == 10
    assert sum(quotas(final).values()) == 256


def test_more_than_one_extra_each() -> None:
    plan = POLICY.assign(40, range(8))
    after = POLICY.reassign(plan, [1, 6])
    # 30 lost over 2: G_ext = 15, n_bdry = 0.
    assert quotas(after) == {1: 20, 6: 20}
    after = POLICY.reassign(plan, [1, 5, 6, 7])
    assert quotas(after) == {1: 10, 5: 10, 6: 10, 7: 10}
    after = POLICY.reassign(plan, [1, 5, 7])
    # 25 lost over 3: G_ext = 9, n_bdry = 2.
    assert quotas(after) == {1: 14, 5: 13, 7: 13}
    assert dict(after.roles) == {1: "major", 5: "boundary-minor", 7: "boundary-minor"}


def test_fewer_microbatches_than_replicas() -> None:
    plan = POLICY.assign(3, range(5))
    assert quotas(plan) == {0: 1, 1: 1, 2: 1, 3: 0, 4: 0}
    assert [plan.roles[r] for r in (3, 4)] == ["major-spare", "major-spare"]
    after = POLICY.reassign(plan, [2, 4])
    # Two majors lost, one spare: id 0 to the spare, id 1 to one of the two survivors.
    assert dict(after.ids) == {2: (2, 1), 4: (0,)}
    assert dict(after.roles) == {2: "major", 4: "boundary-minor"}


@given(st.integers(1, 120), st.integers(2, 20), st.data())
def test_boundary_takes_the_smallest_extra(count: int, replicas: int, data: st.DataObject) -> None:
    """Written a second time from the paper's text: deficit after spares, G_ext, n_bdry."""
    plan = POLICY.assign(count, range(replicas))
    lost = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1, max_size=replicas - 1))
    after = POLICY.reassign(plan, without(plan, *lost))
    shares = sorted((len(plan.ids_of(r)) for r in lost if plan.ids_of(r)), reverse=True)
    spares = [r for r in after.alive if "spare" in plan.roles[r]]
    deficit = sum(shares[len(spares) :])
    alive = len(after.alive)
    extra = next(g for g in range(count + 1) if alive * g >= deficit)
    quota = max(quotas(plan).values())
    assert max(quotas(after).values()) <= quota + extra
    assert len(of_role(after, "boundary-minor")) == alive * extra - deficit
    if deficit:
        assert not [r for r in after.alive if "spare" in after.roles[r]]
    gained = Counter(len(after.ids_of(r)) - len(plan.ids_of(r)) for r in after.alive if r not in spares)
    assert set(gained) <= {max(extra - 1, 0), extra}


def test_a_plan_of_another_policy_is_refused() -> None:
    plan = get_policy("balanced").assign(8, range(4))
    with pytest.raises(ValueError, match="not made by the policy 'recover'"):
        POLICY.reassign(plan, [0, 1])


@pytest.mark.parametrize(
    ("count", "replicas", "lost", "balanced", "recover"),
    [(256, 32, 0, 1, 1), (256, 31, 0, 1, 9), (256, 31, 28, 1, 4), (8192, 64, 0, 3, 3)],
)
def test_cost_table_of_the_documentation(
    count: int, replicas: int, lost: int, balanced: int, recover: int
) -> None:
    """docs/policies.md: the longest list of extra microbatches that one replica runs after a loss."""
    longest = {}
    for name in ("balanced", "recover"):
        policy = get_policy(name)
        plan = policy.assign(count, range(replicas))
        after = policy.reassign(plan, without(plan, lost))
        longest[name] = max(quotas(after)[r] - quotas(plan)[r] for r in after.alive)
    assert longest == {"balanced": balanced, "recover": recover}
