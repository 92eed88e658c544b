"""Layer 2: in-step recovery. What has been reduced, for which epoch, and when it may be used."""

from megatron_recover.recovery.ledger import Bucket, BucketLedger
from megatron_recover.recovery.report import Contribution, check_contributions, odd_replicas

__all__ = ["Bucket", "BucketLedger", "Contribution", "check_contributions", "odd_replicas"]
