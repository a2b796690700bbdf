"""κ: what a second moment of gradients is multiplied by to become a curvature.

With ḡ the expected clipped gradient, F its per-example second moment (the diagonal Fisher) and b the expected batch, the mean
over a Poisson batch has E[g²] − s² = v with

    v = ḡ² + (1 − q) F/b,     so     b v = (1 − q) F + b ḡ²     and     N_ess v = (N_ess/b) b v.

κ = N_ess is IVON's and the paper's. Near an optimum, where ḡ = 0, it makes h about N/b times the Fisher, and the posterior as
much too narrow; κ = b ("-fisher") is the Fisher there, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dpivon.errors import bad
from dpivon.optim.curvature.base import Evidence

Scale = Literal["ess", "batch"]


@dataclass(frozen=True)
class SecondMoment:
    """An estimator ĥ = κ v̂ of the second moment v; a subclass says how ``moment`` finds v̂.

    Attributes:
        scale: κ: ``"ess"`` for N_ess, ``"batch"`` for the expected batch (the names that end in ``-fisher``).
    """

    scale: Scale = "ess"

    base: ClassVar[str] = ""
    elementwise: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.base}-fisher" if self.scale == "batch" else self.base

    def moment(self, evidence: Evidence[Any]) -> Any:
        raise NotImplementedError

    def kappa(self, evidence: Evidence[Any]) -> Any:
        if self.scale == "ess":
            return evidence.ess
        if evidence.batch_size is None:
            raise bad(
                "curvature",
                self.name,
                "scales by the expected batch, which only a private release states",
                f"Train under dpivon.PrivacyEngine, or use {self.base!r}",
            )
        return evidence.batch_size

    def __call__(self, evidence: Evidence[Any]) -> Any:
        return self.moment(evidence) * self.kappa(evidence)
