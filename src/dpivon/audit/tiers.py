"""All checks, tier by tier."""

from __future__ import annotations

from dpivon.audit.tier_a import TIER_A
from dpivon.audit.tier_b import TIER_B
from dpivon.audit.tier_c import TIER_C

CHECKS = [*TIER_A, *TIER_B, *TIER_C]
