"""What every Megatron script needs before its first line runs, with ``--recover`` or without."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from megatron_recover import devices
from megatron_recover.collectives import runtime
from megatron_recover.errors import UserError
from megatron_recover.megatron import arguments, on_cpu, save_queue, wheel


def start(argv: Sequence[str]) -> str:
    """Prepare the device that ``--recover-device`` names, import Megatron, and add the flags to its parser.

    Call it before anything imports torch or Megatron. A second call does nothing.

    Args:
        argv: the command line of the script, without the script.

    Returns:
        ``cuda`` or ``cpu``.

    Raises:
        UserError: a flag of the group has an unusable value, or the device is not there.
    """
    device = devices.install(arguments.peek_device(argv))
    if any(word.endswith("NullTokenizer") for word in argv):
        _import_tokenizers_alone()
    wheel.install()
    save_queue.install()
    if device == "cpu":
        on_cpu.install()
    arguments.install(device)
    return device


def start_script(argv: Sequence[str]) -> None:
    """Prepare a script of ours, as ``start``. With ``--recover``, run it under ``megatron_recover.run``.

    That is where all seams are installed and ranks leave without disturbing others; it replaces the process.
    Where it runs the script already, everything is done and nothing happens. A UserError ends the process.
    """
    with user_errors_end_the_process():
        if not arguments.peek(argv).enabled:
            start(argv)
        elif not _is_recovering():
            runtime.check_environment()
            os.execv(sys.executable, [sys.executable, "-m", "megatron_recover.run", sys.argv[0], *argv])


@contextlib.contextmanager
def user_errors_end_the_process() -> Iterator[None]:
    """Print a UserError as the one sentence that it is, once per job, and exit with its code (2).

    Under ``megatron_recover.run``, which does the same for a job as a whole, it passes through.
    """
    try:
        yield
    except UserError as error:
        if _is_recovering():
            raise
        ranks = (os.environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"))
        if next((rank for rank in ranks if rank is not None), "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(int(error.exit_code)) from None


def _is_recovering() -> bool:
    """Whether the seams are installed. Does not import the adapter, which imports torch."""
    adapter = sys.modules.get("megatron_recover.megatron.adapter")
    return adapter is not None and adapter.get_adapter() is not None


def _import_tokenizers_alone() -> None:
    """Import Megatron's tokenizers without Hugging Face's library, which takes 1 s of every process.

    Megatron imports it for all tokenizers where it finds it; a run whose data is tokenised already uses none
    of them.
    """
    if "transformers" in sys.modules or "megatron.core.tokenizers" in sys.modules:
        return
    sys.modules["transformers"] = None  # type: ignore[assignment]  # makes the import fail, as if not installed
    try:
        import megatron.core.tokenizers.text.libraries  # noqa: F401
    finally:
        del sys.modules["transformers"]
