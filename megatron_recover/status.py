"""How a rank on another host than the launcher's reports to it: by lines on stderr, which mpirun carries.

It says that it has begun, and at the end how the job ended. On the launcher's own host there are processes to look at
and a file (``leaving.write_status``) for that. The launcher takes the lines out of the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

LAUNCHER_HOST_VARIABLE = "MEGATRON_RECOVER_LAUNCHER_HOST"
"""Set by the launcher: its host."""
MARK = b"megatron-recover-status: "


STARTED: dict[str, object] = {"started": True}
WITHDRAWN: dict[str, object] = {"withdrawn": True}
"""What was said about the end holds no longer: the others go on."""


def tell_launcher(status: dict[str, object]) -> None:
    """Says how the job ends (or ``STARTED``, or ``WITHDRAWN``), where the launcher cannot see it. Never raises."""
    launcher = os.environ.get(LAUNCHER_HOST_VARIABLE)
    if launcher and launcher != socket.gethostname():
        with contextlib.suppress(OSError):
            os.write(2, MARK + json.dumps(status).encode() + b"\n")


def is_withdrawal(text: str | bytes) -> bool:
    """Whether this is ``WITHDRAWN``."""
    with contextlib.suppress(ValueError):
        return bool(json.loads(text) == WITHDRAWN)
    return False


def read_status(text: str | bytes) -> dict[str, Any] | None:
    """``exit_code``, ``reason`` and, where known, ``replicas_left`` and ``replica_size``; None if it is not that."""
    try:
        status = json.loads(text)
        known: dict[str, Any] = {"exit_code": int(status["exit_code"]), "reason": str(status.get("reason", ""))}
        for name in ("replicas_left", "replica_size"):
            if status.get(name) is not None:
                known[name] = int(status[name])
        return known
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
