"""The interface of a workload policy, and the policies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from megatron_recover.errors import UserError
from megatron_recover.workload.balanced import BalancedPolicy
from megatron_recover.workload.plan import Plan
from megatron_recover.workload.recover import RecoverPolicy


class Policy(Protocol):
    """Decides which living replica runs which microbatch. Called on every rank, without communication.

    Both methods are pure: the result depends on the arguments (and on what the policy was made with,
    which is the same on every rank) and on nothing else, in particular not on the order or container in
    which ``alive`` is given, on earlier calls, or on which rank asks.
    """

    @property
    def name(self) -> str:
        """What ``--recover-policy`` calls it."""
        ...

    def assign(self, num_microbatches: int, alive: Iterable[int]) -> Plan:
        """The plan at the start of an iteration: ids 0..num_microbatches-1 over the living replicas."""
        ...

    def reassign(self, plan: Plan, alive: Iterable[int]) -> Plan:
        """The plan after a loss inside the iteration that ``plan`` was made for.

        ``alive`` is a non-empty subset of ``plan.alive``. Every survivor keeps the ids it has, in the same
        order, as the beginning of its new ids (it has run some of them already); the ids of the lost
        replicas are appended. With nobody lost the plan comes back as it is.
        """
        ...


_POLICIES: Mapping[str, Callable[[int | None], Policy]] = MappingProxyType(
    {BalancedPolicy.name: BalancedPolicy, RecoverPolicy.name: RecoverPolicy}
)

POLICIES: tuple[str, ...] = tuple(_POLICIES)
"""Names that :func:`get_policy` knows, the default first."""

DEFAULT_POLICY: str = POLICIES[0]


def get_policy(name: str, num_replicas: int | None = None) -> Policy:
    """The policy called ``name``.

    Args:
        name: one of ``POLICIES``.
        num_replicas: replicas at the start of the job; the policy then refuses ids at or above it.

    Raises:
        UserError: there is no such policy.
    """
    try:
        make = _POLICIES[name]
    except KeyError:
        known = " or ".join(POLICIES)
        raise UserError(f"--recover-policy {name} is not known; use {known}.") from None
    return make(num_replicas)
