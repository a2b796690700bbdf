"""From a released gradient to the next posterior: pure post-processing."""

from dpivon.optim.average import EMA
from dpivon.optim.curvature import CurvatureEstimator, Evidence
from dpivon.optim.ivon import IVON
from dpivon.optim.rule import UpdateRule
from dpivon.optim.rule_optimizer import RuleOptimizer

__all__ = ["EMA", "IVON", "CurvatureEstimator", "Evidence", "RuleOptimizer", "UpdateRule"]
