"""Private Bayesian deep learning for PyTorch.

Names that need Opacus are imported when they are first used: importing it takes longer than importing torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpivon._version import __version__
from dpivon.diagnostics import Diagnostics
from dpivon.errors import ArgumentError, DpivonError, PrivacyError, PrivacyWarning, RankError, StorageError
from dpivon.methods import Learner, Method, method
from dpivon.optim import EMA, IVON, CurvatureEstimator, Evidence, RuleOptimizer
from dpivon.optim.sgld import LangevinDynamics
from dpivon.posterior import Posterior, SampledPosterior
from dpivon.predict import predict
from dpivon.release import Release
from dpivon.variational import BayesByBackprop

if TYPE_CHECKING:
    from dpivon.audit import Audit, audit
    from dpivon.fit import Fitted, fit
    from dpivon.privacy import (
        Accountant,
        BatchMemoryManager,
        Budget,
        Checkpoints,
        DPOptimizer,
        NoiseSpec,
        PerExampleLoss,
        PrivacyEngine,
        Resumed,
        budget,
    )
    from dpivon.privacy.augmentation import Augmentation
    from dpivon.privacy.guards import preflight
    from dpivon.privacy.temperature import (
        CalibratedTemperature,
        calibrate_temperature,
        parallel_epsilon,
        temperature_cost,
        temperature_noise,
    )
    from dpivon.recipe import steady

__all__ = [
    "EMA",
    "IVON",
    "Accountant",
    "ArgumentError",
    "Audit",
    "Augmentation",
    "BatchMemoryManager",
    "BayesByBackprop",
    "Budget",
    "CalibratedTemperature",
    "Checkpoints",
    "CurvatureEstimator",
    "DPOptimizer",
    "Diagnostics",
    "DpivonError",
    "Evidence",
    "Fitted",
    "LangevinDynamics",
    "Learner",
    "Method",
    "NoiseSpec",
    "PerExampleLoss",
    "Posterior",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyWarning",
    "RankError",
    "Release",
    "Resumed",
    "RuleOptimizer",
    "SampledPosterior",
    "StorageError",
    "__version__",
    "audit",
    "budget",
    "calibrate_temperature",
    "fit",
    "method",
    "parallel_epsilon",
    "predict",
    "preflight",
    "steady",
    "temperature_cost",
    "temperature_noise",
]

_LAZY = {
    "Audit": "audit",
    "audit": "audit",
    "Fitted": "fit",
    "fit": "fit",
    "steady": "recipe",
    "Augmentation": "privacy.augmentation",
} | dict.fromkeys(
    ("CalibratedTemperature", "calibrate_temperature", "parallel_epsilon", "temperature_cost", "temperature_noise"),
    "privacy.temperature",
)


def __getattr__(name: str) -> Any:
    if name == "priors":
        return importlib.import_module("dpivon.priors")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY.get(name, 'privacy')}"), name)


class _Package(ModuleType):
    """Keeps ``dpivon.audit`` and ``dpivon.fit`` functions when the modules of these names are imported."""

    audit = property(lambda self: __getattr__("audit"), lambda self, module: None)
    fit = property(lambda self: __getattr__("fit"), lambda self, module: None)


sys.modules[__name__].__class__ = _Package
