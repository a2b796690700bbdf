"""The release boundary and everything to its left: the only code that sees data, per-example gradients or their sums."""

from dpivon.privacy.accounting import Accountant, Budget, budget
from dpivon.privacy.checkpoints import Checkpoints, Resumed
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.guards import preflight
from dpivon.privacy.logical_batch import BatchMemoryManager
from dpivon.privacy.losses import PerExampleLoss
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.optimizer import DPOptimizer

__all__ = [
    "Accountant",
    "BatchMemoryManager",
    "Budget",
    "Checkpoints",
    "DPOptimizer",
    "NoiseSpec",
    "PerExampleLoss",
    "PrivacyEngine",
    "Resumed",
    "budget",
    "preflight",
]
