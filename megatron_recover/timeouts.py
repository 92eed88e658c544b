"""How long a wait may last by default, in seconds; each has a flag (docs/flags.md)."""

from __future__ import annotations

HEARTBEAT_TIMEOUT_S = 5.0
PROGRESS_TIMEOUT_S = 600.0
SETUP_TIMEOUT_S = 7200.0
REPAIR_TIMEOUT_S = 60.0
