"""Stochastic gradient Langevin dynamics, in which the privacy noise is the Langevin noise.

    θ ← θ − α G (g + δ θ) + √max(2αT G/N − α² G² s², 0) ξ,   ξ ~ N(0, I)

samples from p(θ | D)^{1/T} ∝ exp(−N (ℓ̄(θ) + δ‖θ‖²/2) / T) as α → 0, where g estimates ∇ℓ̄, N is the public number of training
examples, and δ θ is the gradient of the prior N(0, I/(Nδ)), which knows no data and is added after the release, outside the
clip. A released g contains noise of variance s² = (σC/b)²: the step then makes a Langevin step of temperature

    T_priv = α N G s² / 2 = α N G σ²C² / (2b²)

by itself (without minibatch noise). Where that is less than the wanted T the rest is topped up by ξ, after the boundary: it
costs no privacy and earns none. Where it is more, nothing can be taken away: the chain samples the posterior at T_priv.

SGLD has G = 1 (Welling and Teh, *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, 2011; under privacy Wang,
Fienberg and Smola, *Privacy for Free*, 2015, and Li et al., *On Connecting Stochastic Gradient MCMC and Differential Privacy*,
2019). pSGLD has G = (v̂ + ν²)^(−½), v ← β₂ v + (1 − β₂) g² (Li et al., *Preconditioned Stochastic Gradient Langevin Dynamics*,
2016); as they do, we leave out the term Γ = ∇·G, which 1 − β₂ makes small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpivon.errors import DpivonError, bad, check_number, check_whole
from dpivon.optim.parameters import full_dtype, full_mean, parameter_names
from dpivon.optim.rule import REQUIRED, Hyper, debias, full_like
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.optim.tensors import Values
from dpivon.posterior import SampledPosterior
from dpivon.release import Release

#: T = 1 is the posterior itself; networks predict better from a colder one (Wenzel et al., *How Good is the Bayes Posterior in
#: Deep Neural Networks Really?*, 2020).
TEMPERATURE = 0.1


def implied_temperature(*, lr: Any, ess: Any, noise_variance: Any, preconditioner: Any = 1.0) -> Any:
    """T_priv = α N G s² / 2, with s² the variance of the privacy noise in g."""
    return preconditioner * (lr * ess * noise_variance * 0.5)


@dataclass(frozen=True)
class SGLD:
    """The rule with G = 1. It remembers nothing but θ."""

    name: ClassVar[str] = "sgld"
    defaults: ClassVar[Mapping[str, float]] = {"ess": REQUIRED, "temperature": TEMPERATURE, "weight_decay": 1e-4}
    draws: ClassVar[bool] = True

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        assert normal is not None
        theta, lr = state["mean"], hyper["lr"]
        missing = lr * 2.0 * hyper["temperature"] / hyper["ess"] - lr * lr * noise_variance
        topping = max(missing, 0.0) ** 0.5 if isinstance(missing, float) else missing.clamp(min=0.0).sqrt()
        return {"mean": theta - (g + theta * hyper["weight_decay"]) * lr + normal * topping}


@dataclass(frozen=True)
class PSGLD:
    """The rule with G from a running average of squared gradients."""

    name: ClassVar[str] = "psgld"
    defaults: ClassVar[Mapping[str, float]] = {**SGLD.defaults, "beta2": 0.99, "nu": 1e-5}
    draws: ClassVar[bool] = True

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, "second": full_like(mean, 0.0)}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        assert normal is not None
        theta, lr, beta2 = state["mean"], hyper["lr"], hyper["beta2"]
        second = state["second"] * beta2 + g.square() * (1.0 - beta2)
        preconditioner = self.preconditioner(second, t=t, hyper=hyper)
        wanted = preconditioner * (lr * 2.0 * hyper["temperature"] / hyper["ess"])
        missing = wanted - preconditioner.square() * (lr * lr * noise_variance)
        drift = (g + theta * hyper["weight_decay"]) * preconditioner * lr
        return {"mean": theta - drift + normal * missing.clamp(min=0.0).sqrt(), "second": second}

    def preconditioner(self, second: Values, *, t: Any, hyper: Hyper) -> Values:
        """G = (v̂ + ν²)^(−½)."""
        return (second / debias(hyper["beta2"], t) + hyper["nu"] * hyper["nu"]).rsqrt()


# ---- the samples that are kept

Sample = dict[int, Tensor]

#: Which iterates are kept by default.
CHAIN: dict[str, Any] = {"burn_in": 0.5, "thinning": 1, "max_samples": 64, "max_bytes": 2**28}


class Chain:
    """Kept iterates, each a set of tensors by position, on the CPU.

    Args:
        burn_in: below 1, the share of all steps so far whose iterates are left out; otherwise a number of steps.
        thinning: the first interval between kept iterates.
        max_samples: how many are kept at most.
        max_bytes: and how much memory they may take.
    """

    def __init__(
        self,
        *,
        burn_in: float = CHAIN["burn_in"],
        thinning: int = CHAIN["thinning"],
        max_samples: int = CHAIN["max_samples"],
        max_bytes: int = CHAIN["max_bytes"],
    ) -> None:
        burn_in = check_number("burn_in", burn_in, "Use a share such as 0.5 or a number of steps", at_least=0.0)
        if burn_in >= 1.0:
            burn_in = check_whole("burn_in", burn_in, "Use a share below 1, or a whole number of steps", at_least=1)
        self.burn_in = burn_in
        self.interval = check_whole("thinning", thinning, "Use 1 to keep every iterate", at_least=1)
        self.max_samples = check_whole("max_samples", max_samples, "Keep at least 2 samples", at_least=2)
        self.max_bytes = check_whole("max_bytes", max_bytes, "Use a number of bytes such as 2**28", at_least=1)
        self.steps = 0
        self.kept: dict[int, Sample] = {}  # by the step after which they were taken

    def __len__(self) -> int:
        return len(self.samples())

    def room(self, sample: Sample) -> int:
        """How many samples of this size may be kept."""
        each = sum(t.numel() * t.element_size() for t in sample.values())
        room = min(self.max_samples, self.max_bytes // each)
        if room < 2:
            fix = f"Allow at least {2 * each}, or collect fewer parameters"
            raise bad("max_bytes", self.max_bytes, f"is too little for two samples of {each} bytes", fix)
        return room

    def due(self) -> bool:
        """Count a step; True when its iterate is one to keep."""
        self.steps += 1
        return self.steps % self.interval == 0 and self.steps > self._burnt()

    def add(self, sample: Sample) -> None:
        room = self.room(sample)
        self.kept = self.samples()  # what has become part of the burn-in is of no more use
        self.kept[self.steps] = sample
        while len(self.kept) > room:
            self.interval *= 2
            self.kept = {step: s for step, s in self.kept.items() if step % self.interval == 0}

    def samples(self) -> dict[int, Sample]:
        """The samples after burn-in, by step."""
        return {step: sample for step, sample in self.kept.items() if step > self._burnt()}

    def _burnt(self) -> float:
        return self.burn_in * self.steps if self.burn_in < 1.0 else self.burn_in

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, one stacked tensor a parameter."""
        times = sorted(self.kept)
        stacked = {i: torch.stack([self.kept[t][i] for t in times]) for i in (self.kept[times[0]] if times else {})}
        return {"steps": self.steps, "interval": self.interval, "times": times, "samples": stacked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.interval = int(state["steps"]), int(state["interval"])
        stacked = state["samples"]
        self.kept = {
            int(t): {int(i): values[k].detach().cpu().clone() for i, values in stacked.items()}
            for k, t in enumerate(state["times"])
        }


# ---- the optimizer

_CHAIN = "dpivon_chain"


@dataclass(frozen=True)
class Temperature:
    """At which temperature a chain samples the posterior.

    ``wanted`` is T; ``implied`` is T_priv, what the privacy noise alone makes, ``highest`` its largest value over all
    coordinates (the same as ``implied`` without a preconditioner), and ``tempered`` the share of coordinates where T_priv
    exceeds T, so that the posterior is wider than asked. ``effective`` is the average of max(T, T_priv).
    """

    wanted: float
    implied: float
    highest: float
    effective: float
    tempered: float

    def __str__(self) -> str:
        if self.tempered:
            return (
                f"tempered: privacy noise alone makes temperature {self.implied:.3g}, above the wanted {self.wanted:.3g} "
                f"in {100 * self.tempered:.0f} % of the coordinates"
            )
        return (
            f"temperature {self.wanted:.3g}, of which privacy noise makes {self.implied:.3g} and the rest was topped up"
        )


class LangevinDynamics(RuleOptimizer):
    """(Preconditioned) SGLD, ready for private gradients.

    >>> optimizer = LangevinDynamics(model.parameters(), lr=0.02, ess=len(train_set))
    >>> ...                                        # train as usual
    >>> print(optimizer.temperature())
    >>> predict(model, optimizer.posterior(model), x)

    An iterate of this chain is only approximately a posterior sample: its
    privacy is that of the releases it was made of, as the ledger has it, never that of an exact posterior sample.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: step size α.
        ess: N, the public number of training examples.
        preconditioned: use G from squared gradients (pSGLD) instead of 1.
        generator: source of the top-up noise; the device's default generator if None.
        **options: those of ``Chain`` (``burn_in``, ``thinning``, ``max_samples``, ``max_bytes``), ``temperature`` T (1 is
            the posterior itself, the default a colder one), ``weight_decay`` δ, the precision of the prior divided by N, and
            ``beta2`` and ``nu`` of the preconditioner.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        *,
        preconditioned: bool = False,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self.chain = Chain(**{key: options.pop(key) for key in CHAIN if key in options})
        self._noise_variance = 0.0
        rule = PSGLD() if preconditioned else SGLD()
        super().__init__(params, rule, lr=lr, generator=generator, ess=ess, **options)
        self.chain.room(self._iterate())

    def _stepped(self, release: Release | None) -> None:
        """Keep the iterate if it is due."""
        self._noise_variance = 0.0 if release is None else release.variance
        if self.chain.due():
            self.chain.add(self._iterate(copy=True))

    def _iterate(self, copy: bool = False) -> dict[int, Tensor]:
        params = [p for group in self.param_groups for p in group["params"]]
        sample = {
            i: full_mean(p, self.state.get(p, {})).to(full_dtype(p)) for i, p in enumerate(params) if p.requires_grad
        }
        return {i: t.to("cpu", copy=True) for i, t in sample.items()} if copy else sample

    # ---- the temperature

    @torch.no_grad()
    def temperature(self) -> Temperature:
        """At the last step: what the privacy noise made, what was wanted, and what came of it."""
        implied, effective, wanted, count, above, highest = 0.0, 0.0, 0.0, 0, 0, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                t = implied_temperature(
                    lr=group["lr"],
                    ess=group["ess"],
                    noise_variance=self._noise_variance,
                    preconditioner=self._preconditioner(p, group),
                )
                t, n, asked = torch.as_tensor(t).double().expand(p.shape), p.numel(), group["temperature"]
                count += n
                implied += float(t.sum())
                wanted += asked * n
                effective += float(t.clamp(min=asked).sum())
                above += int((t > asked * (1 + 1e-9)).sum())
                highest = max(highest, float(t.max()) if n else 0.0)
        return Temperature(wanted / count, implied / count, highest, effective / count, above / count)

    def _preconditioner(self, p: Tensor, group: dict[str, Any]) -> Any:
        state = self.state.get(p, {})
        if not isinstance(self.rule, PSGLD) or not state:
            return 1.0
        second: Tensor = state["second"]
        return self.rule.preconditioner(second, t=state["step"], hyper=group)

    # ---- the posterior

    @torch.no_grad()
    def posterior(self, model: nn.Module | None = None) -> SampledPosterior:
        """The kept samples, named as by :meth:`dpivon.IVON.posterior`. Before there are any: the iterate alone."""
        kept = list(self.chain.samples().values()) or [self._iterate(copy=True)]
        params = [p for group in self.param_groups for p in group["params"]]
        trained = [i for i, p in enumerate(params) if p.requires_grad]
        if any(i not in sample for sample in kept for i in trained):
            raise DpivonError("posterior(): a parameter was thawed while samples were kept; collect them anew.")
        names = parameter_names(self, model)
        report = self.temperature()
        metadata = {
            "method": self.rule.name,
            "temperature": f"{report.effective:.6g}",
            "tempered": f"{report.tempered:.6g}",
        }
        return SampledPosterior({names[params[i]]: torch.stack([s[i] for s in kept]) for i in trained}, metadata)

    # ---- the optimizer protocol

    def state_dict(self) -> dict[str, Any]:
        chain = {**self.chain.state_dict(), "noise_variance": self._noise_variance}
        return {**super().state_dict(), _CHAIN: chain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if _CHAIN not in state_dict:
            raise DpivonError("load_state_dict: the state has no chain of samples; it is not one of LangevinDynamics.")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _CHAIN})
        self.chain.load_state_dict(state_dict[_CHAIN])
        self._noise_variance = float(state_dict[_CHAIN]["noise_variance"])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {key: self.__dict__[key] for key in ("chain", "_noise_variance")}
