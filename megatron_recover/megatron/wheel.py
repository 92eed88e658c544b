"""Put right what is missing in the ``megatron-core`` wheel, on any device."""

from __future__ import annotations

import importlib
import importlib.util
import os

from megatron_recover.errors import UserError


def install() -> None:
    """Let Megatron use the dataset helper that is already compiled.

    At start-up Megatron runs ``make`` in its ``core/datasets`` folder. The wheel ships the compiled helper
    but no Makefile, so rank 0 exits and the others wait for it for ever. In a checkout, where the helper may
    have to be compiled, ``make`` still runs. Imports Megatron, so the device must be installed first. A
    second call does nothing.
    """
    from megatron.core.datasets import utils

    if getattr(utils.compile_helpers, "checks_first", False):
        return
    compile_helpers = utils.compile_helpers
    folder = os.path.dirname(os.path.abspath(utils.__file__))

    def compile_helpers_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        if not os.path.exists(os.path.join(folder, "Makefile")):
            raise UserError(
                f"Megatron's dataset helper (helpers_cpp) is missing in {folder}: install a megatron-core "
                "wheel that is built for this Python (pip install --force-reinstall megatron-core)"
            )
        from filelock import FileLock

        # The first rank of every replica comes here, and they would write the same file at once.
        with FileLock(os.path.join(folder, "helpers_cpp.lock")):
            importlib.invalidate_caches()
            if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
                compile_helpers()

    compile_helpers_if_missing.checks_first = True  # type: ignore[attr-defined]
    utils.compile_helpers = compile_helpers_if_missing
