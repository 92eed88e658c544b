"""What layer 1 relies on from MPI (measured before it was designed), repeated with the MPI at hand."""

from __future__ import annotations

from typing import Any

import pytest
from harness import CORE, mpirun


def facts(case: str, num_ranks: int = 3) -> list[dict[str, Any]]:
    done = mpirun(num_ranks, [str(CORE / "facts_program.py"), case], timeout=60)
    assert done.code == 0, done.explain()
    return sorted(done.results, key=lambda result: int(result["rank"]))


@pytest.mark.parametrize("case", ["sigkill", "exit0"])
def test_leaving_by_sigkill_or_exit_0_is_noticed_and_does_not_end_the_job(case: str) -> None:
    results = facts(case)
    assert [result["rank"] for result in results] == [0, 2]
    # The first survivor to be done may have left, too, before the other one looked.
    assert all(1 in result["failed"] for result in results)


def test_an_agreement_fails_on_all_ranks_alike_when_a_member_is_dead() -> None:
    outcomes = {result["outcome"] for result in facts("agree", num_ranks=5)}
    assert outcomes == {"failed"}


def test_a_revocation_frees_ranks_that_are_inside_a_collective() -> None:
    results = facts("revoke")
    assert [result["outcome"] for result in results if result["rank"] != 0] == ["revoked", "revoked"]


def test_shrink_gives_the_living_in_start_order() -> None:
    results = facts("shrink", num_ranks=4)
    assert all(result["members"] == [0, 2, 3] and result["sum"] == 5.0 for result in results)
