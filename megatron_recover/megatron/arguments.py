"""The ``--recover`` flags in Megatron's own parser, and what they say as a ``RecoverConfig``.

Importing this file imports neither torch nor Megatron: ``peek_device`` must run before both.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_recover import devices
from megatron_recover.errors import UserError
from megatron_recover.megatron import cpu_flags, support
from megatron_recover.timeouts import HEARTBEAT_TIMEOUT_S, PROGRESS_TIMEOUT_S, REPAIR_TIMEOUT_S, SETUP_TIMEOUT_S
from megatron_recover.workload import POLICIES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoverConfig:
    """The values of the ``--recover`` flags; ``add_recover_args`` explains each."""

    enabled: bool = False
    policy: str = "balanced"
    min_replicas: int = 1
    shards: int = 1
    inject: tuple[str, ...] = ()
    device: str = "auto"
    events: pathlib.Path | None = None
    check_replicas_interval: int = 100
    """In iterations; 0 turns the check off."""
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S
    """In seconds, as the next three."""
    progress_timeout: float = PROGRESS_TIMEOUT_S
    setup_timeout: float = SETUP_TIMEOUT_S
    repair_timeout: float = REPAIR_TIMEOUT_S

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--recover-min-replicas", self.min_replicas, 1),
            ("--recover-shards", self.shards, 1),
            ("--recover-check-replicas-interval", self.check_replicas_interval, 0),
            ("--recover-heartbeat-timeout", self.heartbeat_timeout, 1),
            ("--recover-progress-timeout", self.progress_timeout, 0),
            ("--recover-setup-timeout", self.setup_timeout, 0),
            ("--recover-repair-timeout", self.repair_timeout, 5),
        ):
            if not value >= least:  # NaN is not either
                raise UserError(f"{flag} {value:g} is too small: give {least} or more")


_DEFAULT = RecoverConfig()


def add_recover_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flag group. Can be given to Megatron as ``extra_args_provider``. A second call does nothing."""
    if "--recover" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(
        title="recover",
        description="Pre-training that survives losing GPUs without a restart. The ranks are cut into "
        "replicas (one whole copy of the model each); when a replica is lost, the others take "
        "over its microbatches inside the same iteration, so each microbatch is still used "
        "exactly once. Start with: megatron-recover launch -n N -- SCRIPT ARGS --recover. "
        "Iterations are counted from 1, as in Megatron's log line; ranks are those at start.",
    )
    group.add_argument(
        "--recover",
        action="store_true",
        help="Survive lost replicas. Without this flag the run is vanilla Megatron, and of the flags below "
        "only --recover-device has an effect.",
    )
    group.add_argument(
        "--recover-policy",
        choices=POLICIES,
        default=_DEFAULT.policy,
        help="Which replica runs which microbatch. balanced: spread evenly over the living replicas, as "
        "Megatron's own sampler does; those of a lost replica go to the least loaded. recover: as in "
        "the ReCoVer paper (arXiv 2605.11215), major replicas with full shares, one minor, and spares "
        "that are promoted. The result of the training is the same. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-min-replicas",
        type=int,
        metavar="N",
        default=_DEFAULT.min_replicas,
        help="Go on as long as N whole replicas live. With fewer, one of them saves a checkpoint (where "
        "--save is set) and the job ends with exit code 70. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-shards",
        type=int,
        metavar="K",
        default=_DEFAULT.shards,
        help="Shard the optimizer over K ranks inside each replica (hybrid sharding): a replica then has "
        "TP x PP x CP x K ranks. Use with --use-distributed-optimizer; also gives a replica room for "
        "--expert-model-parallel-size. Default: %(default)s, no sharding.",
    )
    group.add_argument(
        "--recover-inject",
        action="append",
        metavar="SPEC",
        default=[],
        help="Inject a failure, to see that a setup survives it; repeat the flag for several. For example "
        "kill:rank=3,iteration=5,phase=reduce,bucket=1 or "
        "stop:rank=0,iteration=2,phase=backward,microbatch=0. Kinds and phases: megatron-recover launch --help.",
    )
    group.add_argument(
        "--recover-device",
        choices=devices.CHOICES,
        default=_DEFAULT.device,
        help="Where to run. cpu: the real training loop on the CPU with Gloo, for laptops, tests and demos;"
        " it sets the Megatron flags which that needs (see docs/support.md). auto: cuda where torch "
        "sees a GPU, otherwise cpu. Works without --recover too. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-events",
        type=pathlib.Path,
        metavar="PATH",
        default=_DEFAULT.events,
        help="Append one JSON object per line to this file for each start, failure, repair, takeover and "
        "finish, with iteration, ranks, phase, and detection and repair times in milliseconds. "
        "Default: no file.",
    )
    group.add_argument(
        "--recover-check-replicas-interval",
        type=int,
        metavar="N",
        default=_DEFAULT.check_replicas_interval,
        help="Compare a hash of the parameters across replicas every N iterations, and stop with exit code "
        "72 when two differ; 0 turns it off. Costs one pass over the parameters. With three or more replicas the "
        "one that differs from the majority is dropped instead. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-heartbeat-timeout",
        type=float,
        metavar="S",
        default=_DEFAULT.heartbeat_timeout,
        help="During training a rank that gives no sign of life for S seconds (it is stopped, or one call holds "
        "Python's lock) is killed, and the others go on. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-progress-timeout",
        type=float,
        metavar="S",
        default=_DEFAULT.progress_timeout,
        help="A rank whose training thread comes to no new microbatch or phase for S seconds (an endless loop, a "
        "collective of its replica that hangs) prints its stacks and leaves. Waiting for other replicas does not "
        "count. Must be longer than the longest checkpoint or compilation; 0: never. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-setup-timeout",
        type=float,
        metavar="S",
        default=_DEFAULT.setup_timeout,
        help="The same before the first iteration, while the model and the data sets are built (the first run on a "
        "large corpus builds its index for hours); 0: never. Default: %(default)s.",
    )
    group.add_argument(
        "--recover-repair-timeout",
        type=float,
        metavar="S",
        default=_DEFAULT.repair_timeout,
        help="A repair that does not end within S seconds is given up: stacks are printed, and the launcher starts "
        "the job again from the last checkpoint. Default: %(default)s.",
    )
    return parser


def config_from_args(args: argparse.Namespace) -> RecoverConfig:
    """Read the flags from Megatron's parsed arguments.

    Raises:
        UserError: a number is below its least value.
    """

    def value(name: str) -> Any:
        return getattr(args, f"recover_{name}", getattr(_DEFAULT, name))

    return RecoverConfig(
        enabled=getattr(args, "recover", _DEFAULT.enabled),
        policy=value("policy"),
        min_replicas=value("min_replicas"),
        shards=value("shards"),
        inject=tuple(value("inject")),
        device=value("device"),
        events=value("events"),
        check_replicas_interval=value("check_replicas_interval"),
        heartbeat_timeout=value("heartbeat_timeout"),
        progress_timeout=value("progress_timeout"),
        setup_timeout=value("setup_timeout"),
        repair_timeout=value("repair_timeout"),
    )


def peek(argv: Sequence[str]) -> RecoverConfig:
    """Read the flags from a command line before Megatron is imported, and leave all others alone.

    A wrong value ends the process with argparse's usage message.

    Raises:
        UserError: a number is below its least value.
    """
    parser = add_recover_args(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return config_from_args(parser.parse_known_args(list(argv))[0])


def peek_device(argv: Sequence[str]) -> str:
    """The value of ``--recover-device`` in a command line: ``auto``, ``cuda`` or ``cpu``."""
    return peek(argv).device


def install(device: str) -> None:
    """Give the flags to every script that uses Megatron's parser, whatever ``extra_args_provider`` it has.

    Imports Megatron, so the device must be installed first. A second call does nothing.

    Args:
        device: ``cuda`` or ``cpu``, as ``devices.install`` returned it. On ``cpu`` the flags of ``cpu_flags``
            get the values that a CPU needs, and flags that contradict them are refused.

    With ``--recover``, what it does not support is refused after Megatron's own validation.
    """
    from megatron.training import arguments

    if getattr(arguments.parse_args, "knows_recover", False):
        return
    add_megatron_arguments, parse_args = arguments.add_megatron_arguments, arguments.parse_args
    validate_args = arguments.validate_args

    @functools.wraps(add_megatron_arguments)
    def add_all_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_recover_args(add_megatron_arguments(parser))
        if device == "cpu":
            cpu_flags.set_defaults(parser)
        _mend_help(parser)
        return parser

    @functools.wraps(parse_args)
    def parse_and_check(*positional: Any, **options: Any) -> argparse.Namespace:
        args: argparse.Namespace = parse_args(*positional, **options)
        if device == "cpu":
            cpu_flags.check(args)
        return args

    @functools.wraps(validate_args)
    def validate_and_check(args: argparse.Namespace, *positional: Any, **options: Any) -> argparse.Namespace:
        validated: argparse.Namespace = validate_args(args, *positional, **options)
        if config_from_args(validated).enabled:
            support.check_supported(validated)
        return validated

    parse_and_check.knows_recover = True  # type: ignore[attr-defined]
    _replace_everywhere(add_megatron_arguments, add_all_arguments)
    _replace_everywhere(parse_args, parse_and_check)
    _replace_everywhere(validate_args, validate_and_check)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs on which ``--help`` fails (some help texts of megatron-core 0.19)."""
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace a function in all modules of Megatron, also in those that imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
