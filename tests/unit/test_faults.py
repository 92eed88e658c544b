"""Failure injection: the grammar, and that a fault is carried out where and when it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.errors import UserError
from megatron_recover.faults import (
    GRAMMAR,
    KINDS,
    ONCE_PHASES,
    PHASES,
    REPAIR_STEPS,
    TRY_VARIABLE,
    Fault,
    FaultInjector,
    InjectedFault,
    faults_of_this_try,
    parse_fault,
    parse_faults,
)
from megatron_recover.telemetry.blackbox import read_blackbox

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("kill:rank=3,iteration=5,phase=reduce,bucket=1", Fault("kill", 3, 5, "reduce", 1)),
        ("exit:rank=0,iteration=1,phase=save", Fault("exit", 0, 1, "save", 0)),
        ("exception:phase=eval,iteration=2,rank=7,microbatch=4", Fault("exception", 7, 2, "eval", 4)),
        (" kill: rank=1, iteration=2, phase=after-commit ", Fault("kill", 1, 2, "after-commit", 0)),
        ("kill:rank=1,iteration=2,phase=reduce", Fault("kill", 1, 2, "reduce", 0)),
        ("stop:rank=1,phase=repair,step=2", Fault("stop", 1, 0, "repair", 2)),
        ("crash:rank=0,phase=launch", Fault("crash", 0, 0, "launch", 0)),
    ],
)
def test_grammar(spec: str, fault: Fault) -> None:
    assert parse_fault(spec) == fault


@given(
    st.sampled_from(list(KINDS)),
    st.integers(0, 10**6),
    st.integers(1, 10**9),
    st.sampled_from(list(PHASES)),
    st.integers(0, 10**4),
)
def test_spec_is_read_back(kind: str, rank: int, iteration: int, phase: str, index: int) -> None:
    index = 0 if PHASES[phase] is None else index % len(REPAIR_STEPS) if PHASES[phase] == "step" else index
    fault = Fault(kind, rank, 0 if phase in ONCE_PHASES else iteration, phase, index)
    assert parse_fault(fault.spec) == fault


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "unknown kind ''"),
        ("stab:rank=1,iteration=1,phase=data", "unknown kind 'stab'"),
        ("kill", "nothing follows 'kill'"),
        ("kill:", "nothing follows 'kill'"),
        ("kill:rank=1,iteration=1", "'phase' is missing"),
        ("kill:rank=1,phase=data", "'iteration' is missing"),
        ("kill:iteration=1,phase=data", "'rank' is missing"),
        ("kill:rank,iteration=1,phase=data", "'rank' has no value"),
        ("kill:rank=1,rank=2,iteration=1,phase=data", "'rank' is given twice"),
        ("kill:rank=one,iteration=1,phase=data", "rank='one' is not a whole number from 0"),
        ("kill:rank=-1,iteration=1,phase=data", "rank='-1' is not"),
        ("kill:rank=1,iteration=0,phase=data", "iteration='0' is not a whole number from 1"),
        ("kill:rank=1,iteration=1,phase=lunch", "unknown phase 'lunch'"),
        ("kill:rank=1,iteration=1,phase=data,turn=3", "unknown part 'turn=3'"),
        ("kill:rank=1,iteration=1,phase=data,step=3", "'step' has no meaning in phase 'data'"),
        ("kill:rank=1,iteration=1,phase=repair", "phase 'repair' belongs to no iteration"),
        ("kill:rank=1,phase=repair,step=9", "a repair has steps 0 to 3"),
        ("kill:rank=1,iteration=1,phase=save,step=4", "a save has steps 0 to 3"),
        ("kill:rank=1,iteration=1,phase=data,", "unknown part ''"),
        (
            "kill:rank=1,iteration=1,phase=commit,microbatch=0",
            "'microbatch' has no meaning in phase 'commit'",
        ),
        (
            "kill:rank=1,iteration=1,phase=reduce,microbatch=0",
            "'microbatch' has no meaning in phase 'reduce'",
        ),
        ("kill:rank=1,iteration=1,phase=forward,bucket=0", "'bucket' has no meaning in phase 'forward'"),
    ],
)
def test_wrong_specs_say_what_is_wrong_and_show_the_grammar(spec: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        parse_fault(spec)
    assert problem in str(error.value)
    assert "--recover-inject" in str(error.value)
    assert GRAMMAR in str(error.value)


def test_faults_of_a_run_are_checked_together() -> None:
    specs = ["kill:rank=1,iteration=1,phase=data", "kill:rank=3,iteration=1,phase=data"]
    assert [fault.rank for fault in parse_faults(specs, 4)] == [1, 3]
    assert len(parse_faults(specs, None)) == 2
    assert parse_faults([], 4) == ()
    with pytest.raises(UserError, match="there is no rank 3, the job starts ranks 0 to 2"):
        parse_faults(specs, 3)
    with pytest.raises(UserError, match="rank 1 already ends by"):
        parse_faults([*specs, "exit:rank=1,iteration=9,phase=save"], 4)


def test_happens_once_at_its_place_only(capfd: pytest.CaptureFixture[str]) -> None:
    faults = (Fault("exception", 2, 5, "backward", 3), Fault("exception", 1, 5, "backward", 2))
    injector = FaultInjector(faults, rank=2)
    assert injector.armed("backward", 5)
    assert not injector.armed("backward", 4)
    assert not injector.armed("forward", 5)
    injector.at("backward", 5, 2)
    injector.at("forward", 5, 3)
    injector.at("backward", 4, 3)
    assert list(injector.pending) == [faults[0]]
    with pytest.raises(
        InjectedFault, match="rank 2 raises an exception in iteration 5, phase backward, microbatch 3"
    ):
        injector.at("backward", 5, 3)
    injector.at("backward", 5, 3)
    assert list(injector.pending) == []
    assert not injector.armed("backward", 5)
    assert capfd.readouterr().err.count("fault injection: ") == 1


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("kill", -signal.SIGKILL, "kills itself"),
        ("segfault", -signal.SIGSEGV, "ends with a segmentation fault"),
        ("exit", 0, "leaves"),
        ("crash", 1, "leaves"),
    ],
)
def test_ends_the_process_and_records_its_death(kind: str, code: int, words: str, tmp_path: Path) -> None:
    program = (
        "import sys; from megatron_recover.faults import *\n"
        "from megatron_recover.telemetry.blackbox import BlackBox\n"
        f"faults = parse_faults(['{kind}:rank=3,iteration=5,phase=reduce,bucket=1'], 4)\n"
        f"injector = FaultInjector(faults, 3, BlackBox({str(tmp_path)!r}, 3))\n"
        "injector.at('reduce', 5); sys.stderr = None; injector.at('reduce', 5, 1); sys.exit(9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == code
    assert ended.stderr.startswith("fault injection: rank 3 ")
    assert words in ended.stderr
    assert ended.stderr.endswith(" in iteration 5, phase reduce, bucket 1\n")
    box = read_blackbox(tmp_path, 3)
    assert box is not None
    assert box.pid != os.getpid()
    assert (box.phase, box.iteration, box.index) == ("reduce", 5, 1)
    assert box.died_at >= box.marked_at > 0


def test_running_out_of_memory_is_a_real_memory_error() -> None:
    program = (
        "from megatron_recover.faults import *\n"
        "injector = FaultInjector(parse_faults(['oom:rank=0,iteration=1,phase=data'], 1), 0)\n"
        "try: injector.at('data', 1)\n"
        "except MemoryError: print('caught')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.stdout == "caught\n", ended


def test_state_is_changed_by_its_owner_and_a_pause_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_recover.faults.PAUSE_S", 0.0)
    injector = FaultInjector(
        parse_faults(["corrupt:rank=0,iteration=1,phase=data", "pause:rank=1,iteration=1,phase=data"], 2), 0
    )
    done: list[str] = []
    injector.state_changers["corrupt"] = lambda: done.append("flipped")
    injector.at("data", 1)
    assert done == ["flipped"]
    FaultInjector([Fault("pause", 0, 1, "data")], 0).at("data", 1)
    with pytest.raises(UserError, match="nothing here can be changed yet"):
        FaultInjector([Fault("nan", 0, 1, "data")], 0).at("data", 1)


def test_faults_happen_in_the_first_try_only(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = ["kill:rank=0,phase=init"]
    monkeypatch.setenv(TRY_VARIABLE, "1")
    assert len(faults_of_this_try(specs, 1)) == 1
    monkeypatch.setenv(TRY_VARIABLE, "2")
    assert faults_of_this_try(specs, 1) == ()
