"""Private Bayesian deep learning for PyTorch."""

from dpivon._version import __version__
from dpivon.audit import Audit, audit
from dpivon.diagnostics import Diagnostics
from dpivon.errors import ArgumentError, DpivonError, PrivacyError, PrivacyWarning, RankError, StorageError
from dpivon.fit import Fitted, fit
from dpivon.methods import Learner, Method, method
from dpivon.optim import EMA, IVON, CurvatureEstimator, Evidence, RuleOptimizer
from dpivon.optim.metric import FactoredMetric
from dpivon.optim.sgld import LangevinDynamics
from dpivon.posterior import Posterior
from dpivon.predict import predict
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
    preflight,
)
from dpivon.privacy.augmentation import Augmentation
from dpivon.privacy.temperature import (
    CalibratedTemperature,
    calibrate_temperature,
    parallel_epsilon,
    temperature_cost,
    temperature_noise,
)
from dpivon.recipe import steady
from dpivon.release import Release
from dpivon.sampled_posterior import SampledPosterior
from dpivon.variational import BayesByBackprop

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
    "FactoredMetric",
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
