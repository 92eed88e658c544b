"""The hosts of a job under mpirun: which there are, which still answer, and the mpirun options for those.

mpirun ends the whole job within milliseconds when it loses the daemon of a host. It does not say in a form that can be
read which host that was, so each host is asked by itself, with the means by which the job itself was started there.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recover.processes import JOB_VARIABLE, JobProcesses

HOST_OPTIONS = ("--host", "-H", "--hostfile", "-hostfile", "--machinefile", "-machinefile")
"""mpirun's options that name hosts; each takes one value."""
ANSWER_S = 20.0
"""Within this time a host has to run a program that does nothing."""
_LIST_S = 30.0
_AGENT_OPTIONS: Mapping[str, int] = {"--mca": 2, "--prtemca": 2, "--pmixmca": 2, "--prefix": 1, "--launch-agent": 1}
"""mpirun's options that say how a host is reached and started -> their number of values."""
_HOST = re.compile(r'<host name="([^"]+)" slots="(\d+)"')


@dataclass(frozen=True)
class Host:
    """One host of an allocation."""

    name: str
    slots: int


def allocated(mpirun: Path, options: Sequence[str], environment: Mapping[str, str]) -> list[Host]:
    """The hosts on which mpirun would start ranks, in its order; empty when it does not say.

    mpirun itself is asked, so whatever names them (options, files, a batch system) is read as it reads it.
    """
    words = [str(mpirun), *_root(options), *options, "--display", "allocation:parseable", "--do-not-launch"]
    try:
        answer = subprocess.run(
            [*words, "-n", "1", "true"],
            env={**environment, "PRTE_MCA_prte_keep_fqdn_hostnames": "1"},  # names as they were given
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIST_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Host(name, int(slots)) for name, slots in dict(_HOST.findall(answer)).items()]


def answering(
    mpirun: Path,
    hosts: Sequence[Host],
    options: Sequence[str],
    environment: Mapping[str, str],
    within_s: float = ANSWER_S,
) -> list[Host]:
    """Those hosts that can still start a program, asked all at once."""
    mark = secrets.token_hex(8)
    words = [str(mpirun), *_root(options), *_agent_options(options), "-n", "1"]
    questions = {
        host: subprocess.Popen(
            [*words, "--host", f"{host.name}:1", "true"],
            env={**environment, JOB_VARIABLE: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    }
    deadline = time.monotonic() + within_s
    found = []
    try:
        for host, question in questions.items():
            try:
                if question.wait(max(0.0, deadline - time.monotonic())) == 0:
                    found.append(host)
            except subprocess.TimeoutExpired:
                pass
    finally:
        processes = JobProcesses(mark)
        processes.end_all(grace_s=0.5)
        for question in questions.values():
            question.wait()
        processes.remove_leftovers()
    return found


def without_hosts(options: Sequence[str]) -> list[str]:
    """Options of mpirun without those that name hosts."""
    kept: list[str] = []
    skip = False
    for word in options:
        if skip:
            skip = False
        elif word in HOST_OPTIONS:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in HOST_OPTIONS)):
            kept.append(word)
    return kept


def options_for(hosts: Sequence[Host], options: Sequence[str]) -> tuple[str, ...]:
    """Options of mpirun that start the job on these hosts alone, otherwise as ``options`` say."""
    return ("--host", ",".join(f"{host.name}:{host.slots}" for host in hosts), *without_hosts(options))


def ranks_for(num_ranks: int, hosts: Sequence[Host], left: Sequence[Host]) -> int:
    """Ranks that find place on the hosts that are left of a job of ``num_ranks``."""
    slots, slots_left = sum(host.slots for host in hosts), sum(host.slots for host in left)
    if num_ranks > slots:  # more ranks than slots was allowed: the same crowd on each host as before
        return num_ranks * slots_left // slots if slots else 0
    return min(num_ranks, slots_left)


def _agent_options(options: Sequence[str]) -> list[str]:
    found: list[str] = []
    for place, word in enumerate(options):
        if word in _AGENT_OPTIONS:
            found += options[place : place + 1 + _AGENT_OPTIONS[word]]
    return found


def _root(options: Sequence[str]) -> list[str]:
    return ["--allow-run-as-root"] if os.geteuid() == 0 and "--allow-run-as-root" not in options else []
