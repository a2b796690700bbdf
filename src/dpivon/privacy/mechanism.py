"""The release boundary itself: what a release is, the sole place that adds privacy noise, and who makes it.

One immutable :class:`NoiseSpec` describes a release; noise, bias correction and accounting all read it, so none can disagree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from opacus.optimizers.optimizer import _mark_as_processed
from torch import Tensor, nn

from dpivon.errors import bad, check_choice, check_number, check_whole
from dpivon.optim.parameters import full_dtypes
from dpivon.optim.tensors import TensorList, joins, views
from dpivon.privacy.noise import NoiseSource, TorchNoise, this_process
from dpivon.release import Release

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


_AT_ONCE = 2**24  # numbers of noise that are drawn before they are added, at least
Memory = dict[str, Any]  # tensors (of a stack) or lists of them (of a model) that later noise depends on


@dataclass(frozen=True)
class Mechanism:
    """How noise is drawn, what a release is charged as, and which variance corrections read: the Gaussian mechanism.

    A subclass with a ``name`` of its own is another mechanism; :func:`register_mechanism` makes it known to
    ``make_private(mechanism=…)`` and ``Stack(mechanism=…)``, to ledgers and to checkpoints:

    >>> @register_mechanism
    ... @dataclass(frozen=True)
    ... class Correlated(Mechanism):
    ...     name = "correlated"
    ...     def cost(self, spec): return spec.noise_multiplier / 2, 1.0
    ...     def variance(self, spec): return 1.25 * super().variance(spec)
    ...     def init(self, zeros): return {"last": zeros}
    ...     def noise(self, draw, std, memory): z = draw(std); return z - memory["last"] * 0.5, {"last": z}

    A mechanism draws. The library charges before it asks for noise, and adds what it gets to sums that no mechanism sees.
    """

    name = "gaussian"
    grid = 0.0  #: clipped sums are rounded to multiples of it, if it is not 0; ``cost`` has to cover that

    def cost(self, spec: NoiseSpec) -> tuple[float, float]:
        """(σ, q) of a Poisson-subsampled Gaussian release that is at most as private as this one: what is charged."""
        return spec.noise_multiplier, spec.sample_rate

    def variance(self, spec: NoiseSpec) -> float:
        """Of the noise in each coordinate of the released gradient, (σC/b)²."""
        return (spec.noise_std / spec.divisor) ** 2

    def init(self, zeros: Any) -> Memory:
        """What is remembered from one release to the next. ``zeros`` are shaped as noise is."""
        return {}

    def noise(self, draw: Callable[[Any], Any], std: Any, memory: Memory) -> tuple[Any, Memory]:
        """The noise of one release, and what to remember.

        Args:
            draw: ``draw(s)`` is independent N(0, s²), new with every call: a tensor [K, P] in a stack of K runs, else a
                :class:`~dpivon.optim.tensors.TensorList`.
            std: σC; in a stack a column [K, 1].
            memory: what :meth:`init` or the last call returned.
        """
        return draw(std), memory


MECHANISMS: dict[str, type[Mechanism]] = {"gaussian": Mechanism}
_M = TypeVar("_M", bound=type[Mechanism])


def register_mechanism(kind: _M) -> _M:
    """Make a class of mechanisms known by its ``name``; usable as a decorator."""
    if MECHANISMS.setdefault(kind.name, kind) is not kind:
        raise bad("name", kind.name, "is another mechanism's", "Give the class a name of its own")
    return kind


def check_mechanism(given: Any) -> Mechanism:
    """A registered mechanism, by its name or as it is."""
    if isinstance(given, str):
        return MECHANISMS[check_choice("mechanism", given, tuple(MECHANISMS), "Register it, or use 'gaussian'")]()
    if not isinstance(given, Mechanism) or MECHANISMS.get(given.name) is not type(given):
        fix = "Subclass dpivon.privacy.mechanism.Mechanism and decorate it with register_mechanism"
        raise bad("mechanism", given, "is not a registered mechanism", fix)
    return given


@dataclass(frozen=True)
class NoiseSpec:
    """A mechanism on a Poisson sample's sum of clipped per-example gradients.

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
        mechanism: how noise is drawn and what is charged.
        clipping: the name of the rule that bounds every example (:mod:`dpivon.privacy.clipping`).
        unit: whose contribution C bounds: an example's if it is empty, else a person's, by what says who that is.
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
    mechanism: Mechanism = Mechanism()
    clipping: str = "flat"
    unit: str = ""

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
        """Of the noise in each coordinate of the released gradient."""
        if type(self.mechanism) is Mechanism:
            return self.mechanism.variance(self)
        return check_number("variance", self.mechanism.variance(self), "Let the mechanism state it", at_least=0.0)

    @property
    def cost(self) -> tuple[float, float]:
        """(σ, q) that a release under this spec is charged as."""
        sigma, rate = self.mechanism.cost(self)
        if type(self.mechanism) is Mechanism:
            return sigma, rate
        fix = f"Let cost() of the mechanism {self.mechanism.name!r} return a noise multiplier and a sampling rate"
        return (
            check_number("noise_multiplier", sigma, fix, at_least=0.0),
            check_number("sample_rate", rate, fix, above=0.0, at_most=1.0),
        )

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
        """What a ledger says of a release under this spec: its σ and q are those that are charged."""
        sigma, rate = self.cost
        return {
            "mechanism": f"{self.mechanism.name}, {'' if self.poisson else 'not '}Poisson-sampled",
            "noise_multiplier": sigma,
            "max_grad_norm": self.max_grad_norm,
            "sample_rate": rate,
            "unaccounted": self.unaccounted,
            "noise": self.drawn_by[0],
            "batches": self.drawn_by[1],
            "spec": self.digest,
            **({"unchecked": True} if self.unchecked else {}),
            **({"clipping": self.clipping} if self.clipping != "flat" else {}),
            **({"unit": self.unit} if self.unit else {}),
        }

    @property
    def digest(self) -> str:
        """A short fingerprint of the mechanism, the same for equal specs on every machine."""
        left_out = {"drawn_by", "unchecked"}  # which change no number
        left_out |= {"mechanism"} if self.mechanism == Mechanism() else set()  # digests from before there was another
        left_out |= {"clipping"} if self.clipping in ("flat", "per_layer") else set()
        left_out |= set() if self.unit else {"unit"}
        values = {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name not in left_out}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@torch.no_grad()
def release(
    clipped_sums: dict[Tensor, Tensor],
    spec: NoiseSpec,
    noise: NoiseSource,
    charge: Callable[[NoiseSpec], None],
) -> Release:
    """g_dp = (Σ clipped gradients + noise) / b, charged first; by the Gaussian mechanism the noise is N(0, σ²C² I).

    If the process dies between the charge and the release, budget is wasted; the other order could hide a release.

    On a GPU ``clipped_sums`` is emptied, so that a sum takes no memory beside what is released of it.

    Noise is drawn and added in double and the result is rounded to the parameter's precision (never below fp32) here, before
    anybody sees it: attacks on noise in floating point read its low bits.
    """
    charge(spec)
    sums = [total if total.dtype is torch.float64 else total.double() for total in clipped_sums.values()]
    sums = [on_grid(total, spec) for total in sums] if spec.mechanism.grid else sums
    params = list(clipped_sums)
    dtypes = full_dtypes(params)
    if type(spec.mechanism) is Mechanism and type(noise) is TorchNoise and len(set(dtypes)) == 1 and joins(sums):
        clipped_sums.clear()  # each is let go when its noise is in it
        released: Iterable[Tensor] = _in_place(params, sums, spec, noise, dtypes[0])
    else:
        every = TensorList(sums)
        released = ((_noise(every, spec, noise) + every) / spec.divisor).copied(dtypes)
    return as_release(dict(zip(params, released, strict=True)), spec)


def _in_place(
    params: list[Tensor], sums: list[Tensor], spec: NoiseSpec, noise: TorchNoise, dtype: torch.dtype
) -> list[Tensor]:
    """The same with nothing kept twice: noise for some parameters at a time, to which their sums are added where it lies. The
    release takes each sum's place, also where Opacus keeps it."""
    like, released, sizes = sums[0].new_empty(1), list[Tensor](), [total.numel() for total in sums]
    while sums:
        count = _first_few(sizes)
        some, sums[:count] = sums[:count], []
        own, sizes[:count] = sizes[:count], []
        shapes = [total.shape for total in some]
        drawn = noise.normal(like.expand(sum(own)), spec.noise_std)
        torch._foreach_add_(views(drawn, shapes, own), some)
        some.clear()
        part = views(torch.div(drawn, spec.divisor, out=drawn.new_empty(len(drawn), dtype=dtype)), shapes, own)
        pairs = zip(params[len(released) :], part, strict=False)
        taken = [(p, g) for p, g in pairs if getattr(p, "summed_grad", None) is not None]
        _mark_as_processed([g for _, g in taken])
        for p, g in taken:
            p.summed_grad = g  # type: ignore[attr-defined]
        released += part
    return released


def _first_few(sizes: list[int]) -> int:
    """How many make up enough numbers to draw at once, or all."""
    return next((i + 1 for i, total in enumerate(accumulate(sizes)) if total >= _AT_ONCE), len(sizes))


class ReleaseProgram(Protocol):
    """Clipped sums and their noise as one fixed program: :class:`dpivon.privacy.kernels.whole_step.WholeStep`."""

    def __call__(self, spec: NoiseSpec) -> Release:
        """Run it, with the noise of this spec."""
        ...


def release_by(program: ReleaseProgram, spec: NoiseSpec, charge: Callable[[NoiseSpec], None]) -> Release:
    """:func:`release` of sums that a program computes itself: charged before it is launched."""
    charge(spec)
    return program(spec)


def noised(sums: Tensor, normal: Tensor, std: Tensor, divisor: Tensor) -> Tensor:
    """What :func:`release` computes, of numbers on the device: in double, and rounded once."""
    return ((normal * std + sums) / divisor).float()


def on_grid(sums: Tensor, spec: NoiseSpec) -> Tensor:
    """Sums as the mechanism's noise is added to them."""
    grid = spec.mechanism.grid
    return torch.round(sums / grid) * grid if grid else sums


def _noise(like: TensorList, spec: NoiseSpec, source: NoiseSource) -> TensorList:
    """From the mechanism, which remembers beside the source: copies share both, and new seeds forget."""
    mechanism, at_once = spec.mechanism, getattr(source, "at_once", False)

    def draw(std: float) -> TensorList:
        return like.filled(lambda t: source.normal(t, std), at_once=at_once)

    if type(mechanism) is Mechanism:
        return draw(spec.noise_std)
    here, remembered = this_process(), getattr(source, "memory", None)
    if remembered is None or remembered[0] != here:
        memory = mechanism.init(TensorList([torch.zeros_like(t) for t in like]))
    else:
        memory = {name: TensorList(values) for name, values in remembered[1].items()}
    noise, memory = mechanism.noise(draw, spec.noise_std, memory)
    source.memory = here, {name: list(values) for name, values in memory.items()}  # type: ignore[attr-defined]
    return noise


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


class OneProcess:
    """How clipped sums become one release: here by one process; :mod:`dpivon.privacy.ranks` has it done by several."""

    rank, world = 0, 1
    sharded = False  # whether a rank holds a part of every parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def release(self, optimizer: DPOptimizer, sums: dict[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        """Charged, noised once, the same for all; None if it was dropped unreleased."""
        charge = charge_for(optimizer, decide(optimizer, sums, spec))
        return None if charge is None else release(sums, spec, optimizer.noise, charge)

    def stepped(self, optimizer: DPOptimizer) -> None:
        """The optimizer has learned from the release."""

    def settle(self, module: nn.Module) -> None:
        """The weights that the optimizer holds are about to change: the next forward must see the new ones."""

    def share(self, generator: torch.Generator | None) -> None:
        """The first rank's state, in every rank's generator."""


def decide(optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
    """What this sum is to become; after a resume it may be a release that was made before."""
    return (NEW, "") if optimizer.journal is None else optimizer.journal.decide(sums, spec)


def charge_for(optimizer: DPOptimizer, decision: Decision) -> Callable[[NoiseSpec], None] | None:
    """How to charge what was decided; None if it is dropped."""
    return optimizer.charge if optimizer.journal is None else optimizer.journal.charge_for(decision)
