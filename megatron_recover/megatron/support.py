"""Refuses at start what ``--recover`` does not support."""

from __future__ import annotations

import argparse

from megatron_recover.errors import UserError
from megatron_recover.megatron.refusals import REFUSALS


def check_supported(args: argparse.Namespace) -> None:
    """Refuse what is not supported with ``--recover``. Call it after Megatron's own validation.

    Raises:
        UserError: names the first flag that is refused, why, and the way round.
    """
    for refusal in REFUSALS:
        if refusal.is_on(*(getattr(args, attribute, None) for attribute in refusal.attributes)):
            raise UserError(str(refusal))


def as_table() -> str:
    """The rows as a table in Markdown, for ``docs/support.md``."""
    lines = ["| refused with --recover | why | way round |", "|---|---|---|"]
    lines += [f"| `{row.flag}` | {row.why} | {row.way_round} |" for row in REFUSALS]
    return "\n".join(lines)
