"""The release boundary and everything to its left: the only code that sees data, per-example gradients or their sums."""

from dpivon.privacy.accounting import Accountant, Budget, budget
from dpivon.privacy.checkpoints import Checkpoints, Resumed
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.losses import PerExampleLoss
from dpivon.privacy.memory import BatchMemoryManager
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.preflight import preflight
from dpivon.privacy.spec import NoiseSpec

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
