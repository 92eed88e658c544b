"""The --recover flags, alone and in Megatron's own parser."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover import devices
from megatron_recover.errors import UserError
from megatron_recover.megatron import cpu_flags
from megatron_recover.megatron.arguments import (
    RecoverConfig,
    add_recover_args,
    config_from_args,
    peek,
    peek_device,
)


def parse(*words: str) -> RecoverConfig:
    parser = add_recover_args(argparse.ArgumentParser(allow_abbrev=False))
    return config_from_args(parser.parse_args(words))


def test_defaults_of_parser_and_config_agree() -> None:
    assert parse() == RecoverConfig()


def test_all_flags() -> None:
    assert parse(
        *("--recover", "--recover-policy", "recover", "--recover-min-replicas", "2", "--recover-shards", "4"),
        *("--recover-inject", "kill:rank=3,iteration=5,phase=save", "--recover-inject", "second"),
        *("--recover-device", "cpu", "--recover-events", "a/events.jsonl"),
        *("--recover-check-replicas-interval", "0"),
    ) == RecoverConfig(
        enabled=True,
        policy="recover",
        min_replicas=2,
        shards=4,
        inject=("kill:rank=3,iteration=5,phase=save", "second"),
        device="cpu",
        events=Path("a/events.jsonl"),
        check_replicas_interval=0,
    )


def test_arguments_without_the_group_are_vanilla() -> None:
    assert config_from_args(argparse.Namespace(lr=1.0)) == RecoverConfig()


@pytest.mark.parametrize(
    "flag", ["--recover-min-replicas", "--recover-shards", "--recover-check-replicas-interval"]
)
def test_too_small_numbers_are_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag} -1 is too small: give [01] or more"):
        parse(flag, "-1")


def test_group_is_added_once() -> None:
    parser = argparse.ArgumentParser()
    assert add_recover_args(add_recover_args(parser)) is parser


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ([], "auto"),
        (["--lr", "1", "--recover-device", "cpu"], "cpu"),
        (["--recover-device=cuda", "--data-path", "1.0", "a"], "cuda"),
        (["--recover-device", "cuda", "--recover-device=cpu"], "cpu"),
    ],
)
def test_peek_device(words: list[str], device: str) -> None:
    assert peek_device(words) == device


def test_peek_leaves_other_flags_alone() -> None:
    words = ["--recover", "--num-layers", "2", "--recover-devices", "x", "--help"]
    assert peek(words) == RecoverConfig(enabled=True)


def test_peek_imports_nothing_heavy() -> None:
    code = (
        "import sys; from megatron_recover.megatron import startup; startup.arguments.peek_device([]);"
        "print(sorted({'torch', 'megatron', 'mpi4py', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="--recover-device tpu is not known"):
        devices.resolve("tpu")
    assert devices.resolve("cpu") == "cpu"


def test_contradictions_to_the_cpu_are_refused(megatron_arguments: dict[str, object]) -> None:
    cpu_flags.check(argparse.Namespace(**megatron_arguments))
    for change, message in (
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine"),
        ({"distributed_backend": "nccl"}, "--distributed-backend nccl"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
    ):
        with pytest.raises(UserError, match=f"{message}.* cannot run with --recover-device cpu: "):
            cpu_flags.check(argparse.Namespace(**(megatron_arguments | change)))


def test_flags_are_in_megatrons_parser(megatron_arguments: dict[str, object]) -> None:
    for name in ("recover", "recover_policy", "recover_events", "recover_check_replicas_interval"):
        assert name in megatron_arguments
    assert megatron_arguments["of_the_script"] == 7
    for _, attribute, value in cpu_flags.DEFAULTS:
        assert megatron_arguments[attribute] == value


def test_group_is_in_megatrons_help(megatron_help: str) -> None:
    assert "\nrecover:\n" in megatron_help
    assert "--recover-check-replicas-interval N" in megatron_help
    assert "--num-layers" in megatron_help
