"""The plan's own check, its digest, and the padding for interleaved schedules."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_recover.workload as workload
from megatron_recover.errors import UserError
from megatron_recover.workload import DEFAULT_POLICY, POLICIES, Plan, get_policy, pad_to_schedule

ROLES = {0: "worker", 2: "worker"}


def plan_of(ids: dict[int, tuple[int, ...]], num_microbatches: int = 3) -> Plan:
    return Plan(num_microbatches, (0, 2), ids, ROLES)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({0: (0, 1)}, r"missing \[2\]"),
        ({0: (0, 1), 2: (1, 2)}, r"more than once \[1\]"),
        ({0: (0, 1, 1, 2)}, r"more than once \[1\]"),
        ({0: (0, 1), 2: (2, 3)}, r"unknown \[3\]"),
        ({0: (0, 1), 1: (2,)}, r"\[1\], which are not alive"),
    ],
)
def test_a_wrong_deal_is_refused(ids: dict[int, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(ids)


def test_roles_and_replicas_must_match() -> None:
    with pytest.raises(ValueError, match="names roles for"):
        Plan(1, (0, 2), {0: (0,)}, {0: "worker"})
    with pytest.raises(ValueError, match="no replica is alive"):
        Plan(1, (), {}, {})
    with pytest.raises(ValueError, match="named twice"):
        Plan(1, (0, 0), {0: (0,)}, {0: "worker"})
    with pytest.raises(ValueError, match="at least one microbatch"):
        Plan(0, (0, 2), {}, ROLES)


def test_a_plan_is_canonical_and_read_only() -> None:
    given_ids = {2: (1,), 0: (0, 2)}
    plan = Plan(3, (2, 0), given_ids, {2: "worker", 0: "worker"})
    given_ids[2] = ()
    assert plan == plan_of({0: (0, 2), 2: (1,)})
    assert plan.alive == (0, 2)
    assert list(plan.ids) == list(plan.roles) == [0, 2]
    assert plan.ids_of(2) == (1,)
    assert plan_of({0: (0, 1, 2)}).ids_of(2) == ()
    with pytest.raises(KeyError):
        plan.ids_of(1)
    with pytest.raises(TypeError):
        plan.ids[0] = ()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        plan.num_microbatches = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
    assert len({plan, copy.deepcopy(plan)}) == 1


def test_the_digest_sees_everything() -> None:
    plans = [
        plan_of({0: (0, 1), 2: (2,)}),
        plan_of({0: (1, 0), 2: (2,)}),
        plan_of({0: (0,), 2: (1, 2)}),
        plan_of({0: (0, 1), 2: (2, 3)}, 4),
        Plan(3, (0, 3), {0: (0, 1), 3: (2,)}, {0: "worker", 3: "worker"}),
        Plan(3, (0, 2), {0: (0, 1), 2: (2,)}, {0: "worker", 2: "major"}),
        Plan(3, (0, 2, 4), {0: (0, 1), 2: (2,)}, {**ROLES, 4: "worker"}),
    ]
    digests = [plan.digest() for plan in plans]
    assert len(set(digests)) == len(plans)
    assert all(0 <= digest < 2**64 for digest in digests)


def test_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "from megatron_recover.workload import get_policy\n"
        "p = get_policy('recover', 32)\n"
        "print(p.reassign(p.assign(256, set(range(32))), set(range(32)) - {5, 9}).digest())"
    )
    root = str(Path(workload.__file__).parents[2])
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    # The number itself is pinned: replicas of one job may run different Python versions.
    assert seen == {"13800932906539627662"}


def test_policies_are_known_by_name() -> None:
    assert POLICIES == ("balanced", "recover")
    assert DEFAULT_POLICY == "balanced"
    assert [get_policy(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(UserError, match="--recover-policy fastest is not known; use balanced or recover"):
        get_policy("fastest")


def test_the_layer_imports_nothing_heavy() -> None:
    allowed = {"megatron_recover", *sys.stdlib_module_names}
    for path in Path(workload.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                if name.startswith("megatron_recover"):
                    assert name.startswith(("megatron_recover.workload", "megatron_recover.errors"))


def taken_by_megatron(units: int, pipeline_size: int, group_size: int) -> bool:
    """The two conditions of ``forward_backward_pipelining_with_interleaving``, as written there."""
    refused = group_size > units or group_size < pipeline_size
    return not refused and not 0 < units % group_size < pipeline_size


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 9))
def test_padding_is_the_smallest_count_the_schedule_takes(count: int, pipeline: int, more: int) -> None:
    group = pipeline + more
    units = pad_to_schedule(count, pipeline, group)
    if count == 0:
        assert units == 0
        return
    assert taken_by_megatron(units, pipeline, group)
    assert not any(taken_by_megatron(n, pipeline, group) for n in range(count, units))
    if more == 0:
        assert units == pad_to_schedule(count, pipeline) and units % pipeline == 0


@pytest.mark.parametrize(
    ("count", "pipeline", "group", "units"),
    [
        (0, 4, None, 0),
        (1, 4, None, 4),
        (4, 4, None, 4),
        (5, 4, None, 8),
        (5, 2, 3, 5),
        (4, 2, 3, 5),
        (2, 2, 3, 3),
        (7, 1, None, 7),
    ],
)
def test_padding_examples(count: int, pipeline: int, group: int | None, units: int) -> None:
    assert pad_to_schedule(count, pipeline, group) == units


@pytest.mark.parametrize(("count", "pipeline", "group"), [(-1, 2, None), (1, 0, None), (1, 4, 3)])
def test_padding_refuses_what_megatron_refuses(count: int, pipeline: int, group: int | None) -> None:
    with pytest.raises(ValueError, match="cannot pad"):
        pad_to_schedule(count, pipeline, group)
