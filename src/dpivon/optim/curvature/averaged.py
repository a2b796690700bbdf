"""Second moments that are averaged over steps before anything else is done with them, and pooled or not.

With ḡ the expected clipped gradient, F its per-example second moment (the diagonal Fisher) and b the expected batch, the mean
over a Poisson batch has E[g²] − s² = v with

    v = ḡ² + (1 − q) F/b,     so     b v = (1 − q) F + b ḡ²     and     N_ess v = (N_ess/b) b v.

An estimate v̂ becomes a curvature by ĥ = κ v̂. κ = N_ess is IVON's and the paper's. Near an optimum, where ḡ = 0, it makes h
about N/b times the Fisher, and the posterior as much too narrow; κ = b ("-fisher") is the Fisher there, whatever the batch.

The average a_t = Σ_k w_k (g_k² − s_k²), w_k = (1 − ρ) ρᵗ⁻ᵏ / (1 − ρᵗ), has noise of variance e² = 2 Σ w_k² s_k⁴ where there is
no signal. Σ w_k² = (1 − ρ)(1 + ρᵗ) / ((1 + ρ)(1 − ρᵗ)) is one over the number of steps that it is worth: t at first and
(1 + ρ)/(1 − ρ) in the end, 199 at ρ = .99.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from dpivon.errors import bad
from dpivon.optim.curvature.evidence import Evidence
from dpivon.optim.rule import debias
from dpivon.optim.tensors import TensorList


@dataclass(frozen=True)
class SecondMoment:
    """An estimator ĥ = κ v̂ of the second moment v; a subclass says how ``moment`` finds v̂.

    Attributes:
        scale: κ: ``"ess"`` for N_ess, ``"batch"`` for the expected batch (the names that end in ``-fisher``).
    """

    scale: Literal["ess", "batch"] = "ess"

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


@dataclass(frozen=True)
class SquareAverage(SecondMoment):
    """What estimators share that first average g² − s², with the variance s² that each release really had.

    Those that ask for the error of the average also remember Σ w_k² s_k⁴ ("fourth"), since σ may follow a schedule.
    """

    remembers: ClassVar[tuple[str, ...]] = ("second", "fourth")

    def remember(self, evidence: Evidence[Any]) -> dict[str, Any]:
        rho, s2, before = evidence.decay, evidence.noise_variance, evidence.memory
        second = before["second"] * rho + (evidence.g_squared - s2) * (1.0 - rho)
        if "fourth" not in self.remembers:
            return {"second": second}
        return {"second": second, "fourth": before["fourth"] * (rho * rho) + (s2 * s2) * (1.0 - rho) * (1.0 - rho)}

    def average(self, evidence: Evidence[Any]) -> Any:
        """a_t."""
        return evidence.memory["second"] / debias(evidence.decay, evidence.t)

    def standard_error(self, evidence: Evidence[Any]) -> Any:
        """Of a_t where there is no signal: e = √(2 Σ w_k² s_k⁴), which is s² √(2 Σ w_k²) if s never changed."""
        return (evidence.memory["fourth"] * 2.0).sqrt() / debias(evidence.decay, evidence.t)


@dataclass(frozen=True)
class Averaged(SquareAverage):
    """v̂ = max(a, 0), coordinate by coordinate.

    Bias: only the projection's, of an average worth n = 1/Σ w_k² steps. Where there is no signal n a/s² + n is χ² with n
    degrees of freedom (exactly so for equal weights), and with f_k the density of χ²_k

        E v̂ = 2 s² f_{n+2}(n) ≈ s² / √(π n),

    .484 s² at n = 1, which is the paper's estimator, and .040 s² at ρ = .99. Where v ≫ s² √(2/n) there is none.
    Variance: at most that of a, (2 S² + 4 ḡ² S)/n for a gradient that keeps its distribution; s⁴ (1 − 1/π)/n without a signal.
    """

    base: ClassVar[str] = "averaged"
    remembers: ClassVar[tuple[str, ...]] = ("second",)

    def moment(self, evidence: Evidence[Any]) -> Any:
        return self.average(evidence).clamp(min=0.0)


@dataclass(frozen=True)
class EmpiricalBayes(SquareAverage):
    """v̂_i = M + λ (a_i − M), with M the mean of a over the tensor and

        λ = τ²/(τ² + e²),   τ² = max(Var_i a_i − e², 0).

    Each a_i is v_i and noise of variance e²; the v_i of a tensor of n weights have mean M and variance τ², both estimated
    from the same tensor. λ is the linear rule of least squared error (a Wiener filter): as s → 0 λ → 1 and v̂ = a; without a
    signal λ → 0 and v̂ = M, whose noise is e/√n.

    Bias of one coordinate: (1 − λ)(M − v_i); of the mean over a tensor: none. Variance of one coordinate, for n ≫ 1:
    λ² e² + (1 − λ²) e²/n. Mean squared error over the tensor: λ e², never above a's e² (and M's τ² where that is less).
    Heavy-tailed v_i that stand out are kept nearly whole, since λ is then near 1; it is one λ for the tensor.
    Not projected: v̂ is negative where a tensor's mean is not known to be positive, and IVON's recursion takes it.
    """

    base: ClassVar[str] = "empirical-bayes"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True

    def moment(self, evidence: Evidence[Any]) -> Any:
        a = self.average(evidence)
        noise = self.standard_error(evidence) ** 2
        mean = a.mean((1, 2), keepdim=True)
        off = a - mean
        spread = (off.square().mean((1, 2), keepdim=True) - noise.mean((1, 2), keepdim=True)).clamp(min=0.0)
        # Where neither spread nor noise is left all a_i are the mean, whatever λ.
        return mean + off * (spread / (spread + noise).clamp(min=1e-38))


@dataclass(frozen=True)
class Whole(SquareAverage):
    """v̂ = M, the mean of a over all P weights that are updated together (a group of parameters, a run of a stack).

    P (M + s²) estimates E‖g‖². A step that divides by √(M + s²) goes in the direction of the release, as gradient descent does,
    at the step size D/√(T E‖g‖²) that its theory asks for under noise.

    Bias of one coordinate: M − v_i, whatever the noise; of the mean over all: none. Variance: e²/P, the least that any of these
    can have; M is known where single weights, rows and tensors are not. Not projected: M is negative where the signal is not
    known to be there.
    """

    base: ClassVar[str] = "whole"
    elementwise: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("second",)

    def moment(self, evidence: Evidence[Any]) -> Any:
        a = self.average(evidence)
        if isinstance(a, Tensor):
            return a.mean(1, keepdim=True).expand_as(a)
        mean = sum(each.sum() for each in a) / sum(each.numel() for each in a)
        return TensorList([mean.to(each).expand_as(each) for each in a])
