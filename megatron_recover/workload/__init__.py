"""Layer 3, the versatile workload: which replica runs which microbatch. Pure functions, no I/O.

Imports neither torch nor MPI nor numpy. The policies are described in docs/policies.md.
"""

from megatron_recover.workload.balanced import BalancedPolicy
from megatron_recover.workload.plan import Plan, pad_to_schedule
from megatron_recover.workload.policy import DEFAULT_POLICY, POLICIES, Policy, get_policy
from megatron_recover.workload.recover import RecoverPolicy

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "BalancedPolicy",
    "Plan",
    "Policy",
    "RecoverPolicy",
    "get_policy",
    "pad_to_schedule",
]
