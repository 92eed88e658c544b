"""Makes a replica a torch.distributed world of its own: environment and rendezvous.

The store is made here, on a port that the kernel picks while binding it, so no two replicas or jobs can
collide; torch is told (as torchrun tells it) that the store is served already.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_recover.collectives.runtime import Communicators

_stores: list[Any] = []
"""Keeps this replica's store alive as long as the process."""


def prepare(comms: Communicators) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT of this rank. Collective over all start ranks.

    Also shares one job id and one wandb run id, so that every leader writes to the same run.
    """
    layout = comms.layout
    port = 0
    if comms.coordinate == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(minutes=30))
        _stores.append(store)
        port = store.port
    ports = comms.start.allgather((port, _address(layout)))
    master_port, address = ports[layout.ranks_of(comms.replica)[0]]
    job = comms.start.bcast(os.environ.get("MEGATRON_RECOVER_JOB") or secrets.token_hex(8))
    os.environ.update(
        RANK=str(comms.coordinate),
        WORLD_SIZE=str(layout.replica_size),
        LOCAL_RANK=str(layout.places[comms.rank].local_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(master_port),
        MEGATRON_RECOVER_JOB=job,
        # torch then joins the store at MASTER_PORT instead of serving one there.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.environ.setdefault("WANDB_RUN_ID", job[:16])
    os.environ.setdefault("WANDB_RESUME", "allow")


def _address(layout: Any) -> str:
    hosts = {place.host for place in layout.places}
    return "127.0.0.1" if len(hosts) == 1 else socket.gethostname()
