"""Mean-field Gaussian layers, and how a model gets them and loses them again (Bayes by Backprop)."""

from dpivon.variational.bbp import BayesByBackprop
from dpivon.variational.layers import SPREADS, Variational, is_variational, plain, posterior, variational

__all__ = ["SPREADS", "BayesByBackprop", "Variational", "is_variational", "plain", "posterior", "variational"]
