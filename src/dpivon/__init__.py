"""Private Bayesian deep learning for PyTorch."""

from dpivon._version import __version__
from dpivon.diagnostics import Diagnostics
from dpivon.errors import ArgumentError, DpivonError, PrivacyError, PrivacyWarning
from dpivon.fit import Fitted, fit
from dpivon.optim import IVON, CurvatureEstimator, Evidence
from dpivon.posterior import Posterior
from dpivon.predict import predict
from dpivon.privacy import (
    Accountant,
    BatchMemoryManager,
    Budget,
    DPOptimizer,
    NoiseSpec,
    PrivacyEngine,
    budget,
)
from dpivon.release import Release

__all__ = [
    "IVON",
    "Accountant",
    "ArgumentError",
    "BatchMemoryManager",
    "Budget",
    "CurvatureEstimator",
    "DPOptimizer",
    "Diagnostics",
    "DpivonError",
    "Evidence",
    "Fitted",
    "NoiseSpec",
    "Posterior",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyWarning",
    "Release",
    "__version__",
    "budget",
    "fit",
    "predict",
]
