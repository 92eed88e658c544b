"""Who is told what happens in a session: telemetry, tests, a training loop of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_recover.collectives.repair import Repair
    from megatron_recover.iteration import Iteration


class Observer(Protocol):
    """Told what happens; must not block and must not raise."""

    def phase(self, phase: str, iteration: int, index: int) -> None:
        """This rank enters a phase (training thread; ``reduce`` and ``repair`` from the engine thread)."""

    def repaired(self, report: Repair) -> None:
        """A repair is done (engine thread)."""

    def committed(self, iteration: Iteration) -> None:
        """An iteration is committed (training thread)."""

    def leaving(self, replicas: tuple[int, ...], reason: str) -> None:
        """These replicas are about to leave, and the others know it (training thread of every rank)."""

    def leader_changed(self, leader: int, iteration: int) -> None:
        """Another replica leads from here on (training thread of every rank)."""

    def agreed(self) -> None:
        """All living ranks have come to an agreement (training thread; after ``leader_changed``)."""

    def finished(self, exit_code: int, reason: str) -> None:
        """The job ends (training thread of the leader's first rank)."""


class Silent:
    """An observer that does nothing."""

    def phase(self, phase: str, iteration: int, index: int) -> None: ...
    def repaired(self, report: Repair) -> None: ...
    def committed(self, iteration: Iteration) -> None: ...
    def leaving(self, replicas: tuple[int, ...], reason: str) -> None: ...
    def leader_changed(self, leader: int, iteration: int) -> None: ...
    def agreed(self) -> None: ...
    def finished(self, exit_code: int, reason: str) -> None: ...
