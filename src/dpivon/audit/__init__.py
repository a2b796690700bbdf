"""Evidence that a guarantee holds, or that it does not: three tiers of checks on any model and method."""

from dpivon.audit.run import Audit, audit
from dpivon.audit.session import Finding
from dpivon.audit.tier_c import Audited

__all__ = ["Audit", "Audited", "Finding", "audit"]
