"""What the seams share: the session, the configuration, and where this rank is in its iteration.

The adapter holds no protocol: rounds, commits and repairs are the session's. Each seam is one file, with an
``install(adapter)`` that replaces the Megatron names it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_recover.megatron.arguments import RecoverConfig
from megatron_recover.session import Iteration, Session
from megatron_recover.telemetry.metrics import MetricsWriter
from megatron_recover.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from megatron_recover.megatron.saver import Saver


class Adapter:
    """State of one rank's Megatron run. One per process; made by ``megatron.install``."""

    def __init__(self, session: Session, config: RecoverConfig, recorder: Recorder) -> None:
        self.session = session
        self.config = config
        self.recorder = recorder
        self.iteration: Iteration | None = None
        """The iteration whose rounds are running; None outside of them (and while Megatron finalises)."""
        self.units: tuple[int | None, ...] = ()
        """Microbatch id of each unit the schedule runs in this round; None: zero-weight padding."""
        self.units_before = 0
        """Microbatches this rank ran in earlier rounds of the iteration (for failure injection)."""
        self.position = 0
        """Index into ``units`` of the unit whose forward step runs."""
        self.bucket_index: dict[Any, int] = {}
        """Megatron bucket -> its index among the iteration's buckets."""
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.floating_point_operations = 0.0
        self.on_leader_change: list[Callable[[], None]] = []
        self.on_agreement: list[Callable[[], None]] = []
        self.metrics: MetricsWriter | None = None
        self.completed = 0
        """Iterations whose optimizer step is done."""
        self.is_trained = False
        """The training loop has come to its end."""
        self.saver: Saver

    def at(self, phase: str, index: int = 0) -> None:
        """Marks a phase for telemetry and failure injection."""
        self.session.at(phase, index)

    def leader_changed(self) -> None:
        """Another replica leads: whoever has to open or close something does it now."""
        for react in self.on_leader_change:
            react()

    def agreed(self) -> None:
        """All living ranks have come to an agreement."""
        for react in self.on_agreement:
            react()


_adapter: Adapter | None = None


def set_adapter(adapter: Adapter) -> None:
    """Makes ``adapter`` the one of this process."""
    global _adapter
    _adapter = adapter


def get_adapter() -> Adapter | None:
    """The adapter of this process; None when --recover is off."""
    return _adapter
