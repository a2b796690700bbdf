"""The release boundary itself: what a release is, the sole place that adds privacy noise, and who makes it.

One immutable :class:`NoiseSpec` describes a release; noise, bias correction and accounting all read it, so none can disagree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dpivon.errors import bad, check_choice, check_number, check_whole
from dpivon.optim.precision import full_dtype
from dpivon.optim.tensors import TensorList
from dpivon.privacy.noise import NoiseSource
from dpivon.release import Release

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


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
        """(σC/b)²: variance of the noise in each coordinate of the released gradient."""
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


@torch.no_grad()
def release(
    clipped_sums: Mapping[Tensor, Tensor],
    spec: NoiseSpec,
    noise: NoiseSource,
    charge: Callable[[NoiseSpec], None],
) -> Release:
    """g_dp = (Σ clipped gradients + N(0, σ²C² I)) / b, charged first.

    If the process dies between the charge and the release, the budget has paid for something nobody saw; the other
    order could show something nobody paid for.

    Noise is drawn and added in double and the result is rounded to the parameter's precision (never below fp32) here, before
    anybody sees it: attacks on noise in floating point read its low bits.
    """
    charge(spec)
    sums = TensorList([total.double() for total in clipped_sums.values()])
    noises = sums.filled(lambda like: noise.normal(like, spec.noise_std), at_once=getattr(noise, "at_once", False))
    released = ((noises + sums) / spec.divisor).copied([full_dtype(p) for p in clipped_sums])
    return as_release(dict(zip(clipped_sums, released, strict=True)), spec)


def as_release(gradients: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release:
    """Released gradients with what is public about them."""
    return Release(
        gradients=gradients,
        variance=spec.variance,
        batch_size=spec.divisor if spec.loss_reduction == "mean" else None,
    )


#: What is to become of a sum: a new release, one that was made before a crash, or none; and the evidence of a new one.
Decision = tuple[str, str]
NEW, AGAIN, DROP = "new", "again", "drop"


class Journal(Protocol):
    """Who decides, after a resume, what a release is: a new one, or one that was made before the crash."""

    def decide(self, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
        """What this sum is to become. One rank decides for all."""
        ...

    def charge_for(self, decision: Decision) -> Callable[[NoiseSpec], None] | None:
        """How to charge what was decided; None to drop it unreleased."""
        ...


class Together(Protocol):
    """How clipped sums become one release."""

    rank: int
    world: int
    sharded: bool  # whether a rank holds a part of every parameter

    def release(self, optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        """Charged, noised once, the same for all; None if it was dropped unreleased."""
        ...

    def stepped(self, optimizer: DPOptimizer) -> None:
        """The optimizer has learned from the release."""
        ...

    def settle(self, module: nn.Module) -> None:
        """The weights that the optimizer holds are about to change: the next forward must see the new ones."""
        ...

    def share(self, generator: torch.Generator) -> None:
        """The first rank's state, in every rank's generator."""
        ...


class Alone:
    """One process."""

    rank, world, sharded = 0, 1, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self

    def release(self, optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        charge = charge_for(optimizer, decide(optimizer, sums, spec))
        return None if charge is None else release(sums, spec, optimizer.noise, charge)

    def stepped(self, optimizer: DPOptimizer) -> None:
        pass

    def settle(self, module: nn.Module) -> None:
        pass

    def share(self, generator: torch.Generator) -> None:
        pass


def decide(optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
    return (NEW, "") if optimizer.journal is None else optimizer.journal.decide(sums, spec)


def charge_for(optimizer: DPOptimizer, decision: Decision) -> Callable[[NoiseSpec], None] | None:
    """How to charge what was decided; None if it is dropped."""
    return optimizer.charge if optimizer.journal is None else optimizer.journal.charge_for(decision)
