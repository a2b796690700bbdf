"""Three private optimizers side by side on real handwritten digits, in under a minute on a laptop."""

from dpivon.demo.report import Result
from dpivon.demo.run import run_demo

__all__ = ["Result", "run_demo"]
