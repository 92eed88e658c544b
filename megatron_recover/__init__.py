"""megatron_recover: LLM pre-training on Megatron that loses GPUs and does not notice.

``install()`` is all that a Megatron script needs; ``Session`` is the core for any other PyTorch loop.
Importing this package imports neither torch nor MPI nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Session", "__version__", "install"]

if TYPE_CHECKING:
    from megatron_recover.megatron.install import install
    from megatron_recover.session import Session


def __getattr__(name: str) -> Any:
    if name == "install":
        from megatron_recover.megatron.install import install

        return install
    if name == "Session":
        from megatron_recover.session import Session

        return Session
    raise AttributeError(name)
