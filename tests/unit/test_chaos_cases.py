"""The soak's own logic: what is drawn, how it is written down, and that a wrong run is called wrong."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_recover.errors import UserError
from megatron_recover.faults import KINDS, PHASES, Fault, parse_fault
from trials import core_trainer
from trials.case import HUNG, SURVIVED, WRONG, Case, Result, lost_replicas, parse_case
from trials.core_model import failure_free
from trials.draw import Menu, draw, kinds_at
from trials.jobs import Ended, happened
from trials.judge import Wrong, judge
from trials.table import build_table, count, summary, totals

CASE = parse_case("core layout=4x1 iterations=3 microbatches=4 kill:rank=1,iteration=2,phase=commit")


@pytest.mark.parametrize("trainer", ["core", "megatron"])
def test_a_case_depends_on_seed_and_number_alone_and_is_read_back(trainer: str) -> None:
    menu = Menu(trainer)
    for number in range(200):
        case = draw(menu, 7, number)
        assert case == draw(menu, 7, number)
        assert parse_case(str(case)) == case
    assert len({str(draw(menu, 7, number)) for number in range(200)}) > 190


@pytest.mark.parametrize("trainer", ["core", "megatron"])
def test_one_replica_is_always_left_and_each_rank_has_one_fault(trainer: str) -> None:
    for number in range(300):
        case = draw(Menu(trainer), 3, number)
        assert case.faults
        _, may = lost_replicas(case, case.faults)
        assert len(may) < case.num_replicas
        assert len({fault.rank for fault in case.faults}) == len(case.faults)
        for fault in case.faults:
            assert 0 <= fault.rank < case.num_ranks
            assert fault.kind in kinds_at(Menu(trainer), fault.phase)
            assert parse_fault(fault.spec) == fault


def test_everything_on_the_menu_is_drawn() -> None:
    seen = {(f.kind, f.phase) for n in range(4000) for f in draw(Menu(), 1, n).faults}
    wanted = {(kind, phase) for phase in Menu().phases for kind in kinds_at(Menu(), phase)}
    assert seen == wanted


def test_a_small_menu() -> None:
    menu = Menu("core", ("8x2",), ("stop",), ("repair",))
    faults = [fault for number in range(50) for fault in draw(menu, 1, number).faults]
    assert {fault.phase for fault in faults} == {"repair", "forward"}  # a repair needs a failure before it
    assert {fault.kind for fault in faults} == {"stop"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "first word"),
        ("core kill:rank=0,phase=init", "layout=... is missing"),
        ("core layout=8x3", "RANKSxSIZE"),
        ("core layout=2x2", "one replica alone"),
        ("core layout=4x1 depth=3", "'depth=3' is none of"),
        ("core layout=4x1 iterations=many", "needs a number"),
        ("core layout=4x1 kill:rank=4,phase=init", "no rank 4"),
        ("core layout=4x1 policy=none", "policy=none"),
        ("megatron layout=dp99", "Megatron's are"),
    ],
)
def test_what_cannot_be_repeated_is_said(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_case(text)


def test_unknown_kinds_and_phases_are_refused() -> None:
    with pytest.raises(UserError, match="--kinds melt"):
        Menu(kinds=("melt",))
    with pytest.raises(UserError, match="--phases lunch"):
        Menu(phases=("lunch",))
    with pytest.raises(UserError, match="none of nan"):
        Menu(kinds=("nan",), phases=("save",))


@pytest.mark.parametrize("kind", KINDS)
def test_the_announcement_of_each_fault_is_understood(kind: str) -> None:
    """What the injector writes before it acts is what counts as happened."""
    faults = [
        Fault(kind, rank, 0 if "iteration" not in str(Fault(kind, rank, 3, phase)) else 3, phase, 2 if unit else 0)
        for rank, (phase, unit) in enumerate(PHASES.items())
    ]
    text = "".join(f"[1,{n}]<stderr>: fault injection: {fault}\nnoise\n" for n, fault in enumerate(faults))
    assert happened(text, faults) == tuple(faults)
    others = [dataclasses.replace(fault, rank=fault.rank + 100) for fault in faults]
    assert happened(text, others) == ()
    assert happened(f"fault injection: {faults[4].spec} did not happen: this rank never came there", faults) == ()


def survivors(folder: Path, **changes: Any) -> None:
    """What the survivors of CASE write."""
    curve = failure_free(CASE.width, CASE.iterations, CASE.microbatches, CASE.eval_every)
    for rank in (0, 2, 3):
        result = {
            "rank": rank,
            "coordinate": 0,
            "try": 1,
            "losses": curve.losses,
            "evaluations": curve.evaluations,
            "weights": "same",
            "alive": [0, 2, 3],
            "wrong": [],
        }
        result |= changes if rank == 2 else {}
        (folder / f"result-{rank}.json").write_text(json.dumps(result))


def verdict(folder: Path, *, code: int = 0, timed_out: bool = False, fired: bool = True) -> Result:
    err = f"fault injection: {CASE.faults[0]}\n" if fired else ""
    return judge(CASE, 5, Ended(code, timed_out, 1.0, "", err), folder, core_trainer.read)


def test_a_right_run_has_survived(tmp_path: Path) -> None:
    survivors(tmp_path)
    result = verdict(tmp_path)
    assert (result.verdict, result.reason, result.fired) == (SURVIVED, "", CASE.faults)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": "other"}, "weights of ranks 0 and 2 differ"),
        ({"alive": [2, 3]}, "alive of ranks 0 and 2 differ"),
        ({"wrong": ["iteration 1: microbatches were used [1, 2, 1, 1] times"]}, "used"),
        ({"losses": {}}, "losses of ranks 0 and 2 differ"),
    ],
)
def test_a_wrong_run_is_called_wrong(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    survivors(tmp_path, **changes)
    result = verdict(tmp_path)
    assert result.verdict == WRONG
    assert says in result.reason


def test_losses_off_the_curve_are_wrong(tmp_path: Path) -> None:
    survivors(tmp_path)
    for path in tmp_path.glob("result-*.json"):
        result = json.loads(path.read_text())
        result["losses"]["2"][1] *= 1.0001
        path.write_text(json.dumps(result))
    assert "losses of iteration 2" in verdict(tmp_path).reason


def test_a_replica_that_is_lost_without_a_fault_is_wrong(tmp_path: Path) -> None:
    survivors(tmp_path)
    assert "replicas [1] were lost without a fault" in verdict(tmp_path, fired=False).reason


def test_other_ends(tmp_path: Path) -> None:
    assert verdict(tmp_path).reason == "no rank came to its end"
    survivors(tmp_path)
    assert verdict(tmp_path, timed_out=True).verdict == HUNG
    assert verdict(tmp_path, code=73).reason.startswith("exit code 73")
    (tmp_path / "result-3.json").unlink()
    assert "came to their end" in verdict(tmp_path).reason


def test_a_missing_evaluation_is_wrong(tmp_path: Path) -> None:
    survivors(tmp_path)
    for path in tmp_path.glob("result-*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluations": {}}))
    with pytest.raises(Wrong, match="evaluations"):
        core_trainer.read(CASE, Ended(0, False, 1.0, "", ""), tmp_path)


def test_a_flipped_bit_and_sigterm_at_the_end_need_not_lose_a_replica() -> None:
    case = Case("core", "4x1", iterations=12)
    early, late = Fault("term", 0, 10, "forward"), Fault("term", 1, 11, "forward")
    at_the_end, pause = Fault("kill", 2, 0, "exit"), Fault("pause", 3, 2, "forward")
    assert lost_replicas(case, [early, late, at_the_end, pause]) == ({0}, {0, 1, 2})


def test_the_table_counts_what_happened() -> None:
    faults = (CASE.faults[0], Fault("stop", 2, 0, "repair", 1))
    case = dataclasses.replace(CASE, faults=(*faults, Fault("exit", 3, 2, "save")))
    results = [Result(case, 1, SURVIVED, fired=faults, detect_ms=[10.0, 30.0], repair_ms=[60.0], seconds=4.0)]
    results.append(Result(case, 2, HUNG, reason="had not ended", fired=faults[:1]))
    assert count(results)["kill", "commit"] == {SURVIVED: 1, HUNG: 1}
    figures = totals(results)
    assert (figures["failures"], figures["did_not_happen"], figures["detect_ms"]["worst"]) == (3, 3, 30.0)
    console = Console(width=120, file=io.StringIO())
    console.print(build_table(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "1 1 HUNG" in text and "repair: settled" in text
    assert summary(results)[0].startswith("3 failures in 2 jobs: 2 survived, 0 restarted, 1 hung, 0 wrong")
