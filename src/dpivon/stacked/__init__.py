"""Many private runs as one program."""

from dpivon.stacked.networks import AnyNetwork, Network, PaperNetwork
from dpivon.stacked.stack import Run, Stack

__all__ = ["AnyNetwork", "Network", "PaperNetwork", "Run", "Stack"]
