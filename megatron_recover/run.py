"""``python -m megatron_recover.run SCRIPT ARGS``: runs a training script as one rank of a job.

With --recover among ARGS the seams are installed first, and any unmodified Megatron ``pretrain_*.py`` runs.
Without it the script uses the public core (``megatron_recover.session``) by itself. Either way the rank leaves
in a way that does not disturb the others.

What is imported before the keeper forks is in every process twice, so it is next to nothing.
"""

from __future__ import annotations

import os
import sys

from megatron_recover.keeper import keep


def main() -> None:
    """Does not return."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or 0)
    keep(_run, os.environ.get("MEGATRON_RECOVER_JOB_DIR"), rank)


def _run() -> None:
    from megatron_recover.status import STARTED, tell_launcher

    tell_launcher(STARTED)
    from megatron_recover import rank

    rank.main(sys.argv[1:])


if __name__ == "__main__":
    main()
