"""One immutable description of a release. Noise, bias correction and accounting all read it, so they cannot disagree."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpivon.errors import bad, check_choice, check_number, check_whole


@dataclass(frozen=True)
class NoiseSpec:
    """A Poisson-subsampled Gaussian mechanism on a sum of clipped per-example gradients.

    Every quantity is public: none may be computed from the batch that was drawn.

    Attributes:
        noise_multiplier: σ, the noise's standard deviation in units of C. 0 means no noise, and no guarantee.
        max_grad_norm: C, the bound on one example's contribution to the sum (its l2 sensitivity).
        expected_batch_size: b = q·N.
        sample_rate: q, the probability with which each example enters a batch.
        loss_reduction: ``"mean"`` releases sum/b, ``"sum"`` the sum itself.
        accumulated: how many batches this release merges (1 under Poisson sampling).
        poisson: whether batches are really drawn by Poisson sampling; without it q amplifies nothing.
        drawn_by: where noise and batches come from (:mod:`dpivon.privacy.noise`), for the ledger; it changes no number.
        unchecked: whether the caller answers for it that no row of a batch depends on another.
    """

    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float
    sample_rate: float
    loss_reduction: str = "mean"
    accumulated: int = 1
    poisson: bool = True
    drawn_by: tuple[str, str] = ("unstated", "unstated")
    unchecked: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        sigma = check_number("noise_multiplier", self.noise_multiplier, "Use a value such as 1.0", at_least=0.0)
        norm = check_number("max_grad_norm", self.max_grad_norm, "Use a finite bound such as 1.0", above=0.0)
        batch = check_number("expected_batch_size", self.expected_batch_size, "Use the public b = q·N", above=0.0)
        rate = check_number("sample_rate", self.sample_rate, "Use q = b/N in (0, 1]", above=0.0, at_most=1.0)
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"), "Match your loss function's reduction")
        count = check_whole("accumulated", self.accumulated, "Use the number of merged batches", at_least=1)
        fix = "Use a bound C and noise σC between 1e-30 and 1e30, such as 1.0"
        if not 1e-30 <= norm <= 1e30:
            raise bad("max_grad_norm", self.max_grad_norm, "is beyond what single precision can clip to", fix)
        if sigma > 0 and not 1e-30 <= sigma * norm <= 1e30:
            raise bad("noise_multiplier", self.noise_multiplier, "makes noise that single precision cannot hold", fix)
        if self.poisson and count > 1:
            raise bad("accumulated", count, "Poisson batches cannot be merged", "Release after every batch")
        for name, value in zip(
            ("noise_multiplier", "max_grad_norm", "expected_batch_size", "sample_rate", "accumulated"),
            (sigma, norm, batch, rate, count),
            strict=True,
        ):
            set_(self, name, value)

    @property
    def noise_std(self) -> float:
        """σC: standard deviation of the noise that is added to the clipped sum."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def divisor(self) -> float:
        """What the noisy sum is divided by: the expected batch, never the drawn one, whose size is private."""
        return self.expected_batch_size * self.accumulated if self.loss_reduction == "mean" else 1.0

    @property
    def variance(self) -> float:
        """(σC/b)²: variance of the noise in each coordinate of the released gradient; under a metric, before D is taken out."""
        return (self.noise_std / self.divisor) ** 2

    @property
    def unaccounted(self) -> str | None:
        """Why a release under this spec carries no guarantee, or None if it carries one."""
        if self.noise_multiplier == 0.0:
            return "noise_multiplier=0"
        if not self.poisson:
            return "poisson_sampling=False"
        return None

    def replace(self, **changes: Any) -> NoiseSpec:
        """The same release but for these changes, checked again."""
        return replace(self, **changes)

    @property
    def terms(self) -> dict[str, Any]:
        """What a ledger says of a release under this spec."""
        return {
            "mechanism": "gaussian, Poisson-sampled" if self.poisson else "gaussian, not Poisson-sampled",
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "sample_rate": self.sample_rate,
            "unaccounted": self.unaccounted,
            "noise": self.drawn_by[0],
            "batches": self.drawn_by[1],
            "spec": self.digest,
            **({"unchecked": True} if self.unchecked else {}),
        }

    @property
    def digest(self) -> str:
        """A short fingerprint of the mechanism, the same for equal specs on every machine."""
        left_out = {"drawn_by", "unchecked"}  # which change no number
        text = json.dumps({k: repr(v) for k, v in asdict(self).items() if k not in left_out}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
