"""Checks of a command line before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_recover import preflight
from megatron_recover.errors import ExitCode, UserError
from megatron_recover.preflight import ScriptArguments
from megatron_recover.workload import POLICIES


def words(line: str) -> ScriptArguments:
    return ScriptArguments(tuple(line.split()))


def test_arguments_are_read_as_megatron_reads_them() -> None:
    arguments = words("--recover --a 1 --b=2 --a=3 --c x y --d --recover-inject one --recover-inject=two")
    assert arguments.has("--recover")
    assert arguments.has("--b")
    assert not arguments.has("--recover-i")
    assert arguments.integer("--a") == 3
    assert arguments.integer("--b") == 2
    assert arguments.integer("--e") is None
    assert arguments.integer("--e", default=7) == 7
    assert arguments.lists("--c") == [["x", "y"]]
    assert arguments.values("--d") == []
    assert arguments.values("--recover-inject") == ["one", "two"]
    for line, problem in (("--a x", "not a whole number"), ("--a 0", "too small"), ("--a -2", "too small")):
        with pytest.raises(UserError, match=f"--a .*{problem}"):
            words(line).integer("--a")


def test_replica_size() -> None:
    assert preflight.replica_size(words("")) == 1
    line = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=3 --context-parallel-size 5"
    assert preflight.replica_size(words(line)) == 30
    assert preflight.replica_size(words(line + " --recover-shards 2")) == 60


def test_whole_command_lines(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    for suffix in (".idx", ".bin"):
        (tmp_path / f"data{suffix}").touch()
    good = "--recover --tensor-model-parallel-size 2 --global-batch-size 16 --micro-batch-size 4"
    good += f" --data-path {tmp_path}/data"
    preflight.check(str(script), good.split(), 4)
    with pytest.raises(UserError) as error:
        preflight.check(str(script), good.split(), 3)
    assert error.value.exit_code == ExitCode.BAD_CONFIGURATION
    assert str(error.value) == (
        "-n 3 is not a multiple of the replica size 2 (--tensor-model-parallel-size 2), so it cannot be cut "
        "into whole replicas: use -n 2 or -n 4."
    )
    with pytest.raises(UserError, match=r"--recover is missing from the arguments of pretrain_gpt\.py"):
        preflight.check(str(script), [], 4)


def test_other_programs_have_their_own_flags(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    preflight.check(str(script), ["--data-path", "anything", "--global-batch-size", "many"], 3)
    with pytest.raises(UserError, match="--recover is missing"):
        preflight.check(str(script), ["--recover-shards", "2"], 4)


@pytest.mark.parametrize(
    ("check", "line", "problem"),
    [
        (lambda a: preflight.check_replicas(a, 1), "--context-parallel-size 2", "use -n 2."),
        (lambda a: preflight.check_replicas(a, 4), "--recover-shards 3", "use -n 3 or -n 6"),
        (
            lambda a: preflight.check_replicas(a, 4),
            "--recover-min-replicas 5",
            "more than the 4 replicas that -n 4",
        ),
        (
            lambda a: preflight.check_replicas(a, 4),
            "--recover-min-replicas 0",
            "--recover-min-replicas 0 is too small",
        ),
        (
            preflight.check_batch,
            "--global-batch-size 3 --micro-batch-size 4",
            "is not a multiple of .*: use 4",
        ),
        (
            preflight.check_batch,
            "--global-batch-size 12 --micro-batch-size 4 --recover-shards 2",
            "--micro-batch-size 4 x --recover-shards 2: use 8 or 16",
        ),
        (
            preflight.check_policy,
            "--recover-policy=fair",
            "--recover-policy 'fair' is unknown: choose one of balanced",
        ),
        (lambda a: preflight.check_faults(a, 2), "--recover-inject kill:rank=0", "'iteration' is missing"),
        (
            lambda a: preflight.check_faults(a, 2),
            "--recover-inject kill:rank=0,iteration=1,phase=data "
            "--recover-inject=kill:rank=2,iteration=1,phase=data",
            "there is no rank 2",
        ),
        (lambda a: preflight.check_num_ranks(0), "", "-n 0 starts nothing"),
    ],
)
def test_refused(check: Callable[[ScriptArguments], object], line: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check(words(line))


def test_accepted() -> None:
    for policy in POLICIES:
        preflight.check_policy(words(f"--recover-policy {policy}"))
    preflight.check_batch(words("--global-batch-size 16 --micro-batch-size 2 --recover-shards 4"))
    preflight.check_batch(words("--global-batch-size 7"))
    preflight.check_replicas(words("--recover-min-replicas 2 --recover-shards 2"), 4)
    assert len(preflight.check_faults(words("--recover-inject kill:rank=0,iteration=1,phase=data"), 2)) == 1


def test_data_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.idx", "a.bin", "b.idx", "b.bin", "c.bin"):
        (tmp_path / name).touch()
    preflight.check_data(words("--data-path a"))
    preflight.check_data(
        words("--data-path 0.3 a 0.7 b --train-data-path a b --valid-data-path s3://bucket/x")
    )
    preflight.check_data(words("--mock-data"))
    for line, problem in (
        ("--data-path 0.3 a 0.7 x", "--data-path x: there is no file x.idx"),
        ("--data-path=c", "there is no file c.idx"),
        ("--valid-data-path x", "--valid-data-path x: .*megatron-recover prepare-data"),
        ("--data-path a.bin", "give the prefix without the file's ending, --data-path a[.]"),
    ):
        with pytest.raises(UserError, match=problem):
            preflight.check_data(words(line))


def test_a_save_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    preflight.check_save(preflight.ScriptArguments(("--save", str(tmp_path / "new" / "folder"))))
    with pytest.raises(UserError, match="is not a folder; give a folder"):
        preflight.check_save(preflight.ScriptArguments(("--save", str(file / "checkpoints"))))
