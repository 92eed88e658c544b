"""How a rank on another host than the launcher's tells it how the job ended: a line on stderr, which mpirun carries.

On the launcher's host there is a file for that (``leaving.write_status``). The launcher takes the line out of the
output.
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


def tell_launcher(status: dict[str, object]) -> None:
    """Says how the job ends, where the launcher cannot read it. Never raises."""
    launcher = os.environ.get(LAUNCHER_HOST_VARIABLE)
    if launcher and launcher != socket.gethostname():
        with contextlib.suppress(OSError):
            os.write(2, MARK + json.dumps(status).encode() + b"\n")


def read_status(text: str | bytes) -> dict[str, Any] | None:
    """``exit_code``, ``reason`` and, where it is known, ``replicas_left``; None if it is not that."""
    try:
        status = json.loads(text)
        known: dict[str, Any] = {"exit_code": int(status["exit_code"]), "reason": str(status.get("reason", ""))}
        if status.get("replicas_left") is not None:
            known["replicas_left"] = int(status["replicas_left"])
        return known
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
