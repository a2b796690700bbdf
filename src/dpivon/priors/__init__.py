"""Priors that no one's data is in: random image processes, and self-supervised learning on them.

An import contract keeps every reader of data out of this package. Only ``features`` is ever given private inputs.
"""

from dpivon.priors.features import Features
from dpivon.priors.learning import Learning, Settings, learn
from dpivon.priors.processes import MIXTURES, PROCESSES, images
from dpivon.priors.start import BUILT_IN, start_from

__all__ = ["BUILT_IN", "MIXTURES", "PROCESSES", "Features", "Learning", "Settings", "images", "learn", "start_from"]
