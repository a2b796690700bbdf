"""Many private runs as one program."""

from dpivon.stacked.ensemble import Ensemble, ensemble_noise, joint_epsilon
from dpivon.stacked.networks import AnyNetwork, Network, PaperNetwork, register_program
from dpivon.stacked.run import Run
from dpivon.stacked.stack import Stack

__all__ = [
    "AnyNetwork",
    "Ensemble",
    "Network",
    "PaperNetwork",
    "Run",
    "Stack",
    "ensemble_noise",
    "joint_epsilon",
    "register_program",
]
