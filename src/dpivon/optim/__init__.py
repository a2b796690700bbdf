"""From a released gradient to the next posterior: pure post-processing."""

from dpivon.optim.curvature import CurvatureEstimator, Evidence
from dpivon.optim.ivon import IVON

__all__ = ["IVON", "CurvatureEstimator", "Evidence"]
