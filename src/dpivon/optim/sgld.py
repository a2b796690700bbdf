"""SGLD as an optimizer that keeps the samples it visits and says at what temperature it visits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import DpivonError, bad
from dpivon.optim.chain import Chain
from dpivon.optim.precision import full_dtype, full_mean
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.optim.sgld_rule import PSGLD, SGLD, TEMPERATURE, implied_temperature
from dpivon.posterior import SampledPosterior, unwrap
from dpivon.release import Release

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

    The update is in :mod:`dpivon.optim.sgld_rule`. An iterate of this chain is only approximately a posterior sample: its
    privacy is that of the releases it was made of, as the ledger has it, never that of an exact posterior sample
    (``dpivon.privacy.accounting.posterior_sampling``).

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: step size α.
        ess: N, the public number of training examples.
        temperature: T; 1 is the posterior itself, the default a colder one.
        weight_decay: δ, the precision of the prior divided by N.
        preconditioned: use G from squared gradients (pSGLD) instead of 1.
        burn_in: below 1, the share of steps left out of the posterior; otherwise a number of steps.
        thinning: how many steps from one kept iterate to the next, at first; doubled whenever there is no more room.
        max_samples: how many iterates are kept at most.
        max_bytes: how much memory they may take, on the CPU.
        generator: source of the top-up noise; the device's default generator if None.
        **hyper: ``beta2`` and ``nu`` of the preconditioner.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        *,
        temperature: float = TEMPERATURE,
        weight_decay: float = 1e-4,
        preconditioned: bool = False,
        burn_in: float = 0.5,
        thinning: int = 1,
        max_samples: int = 64,
        max_bytes: int = 2**28,
        generator: torch.Generator | None = None,
        **hyper: float,
    ) -> None:
        self.chain = Chain(burn_in=burn_in, thinning=thinning, max_samples=max_samples, max_bytes=max_bytes)
        self._noise_variance = 0.0
        hyper = {"ess": ess, "temperature": temperature, "weight_decay": weight_decay, **hyper}
        super().__init__(params, PSGLD() if preconditioned else SGLD(), lr=lr, generator=generator, **hyper)
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
        """The kept samples, under ``model``'s names (by position if None). Before there are any: the iterate alone."""
        kept = list(self.chain.samples().values()) or [self._iterate(copy=True)]
        params = [p for group in self.param_groups for p in group["params"]]
        trained = [i for i, p in enumerate(params) if p.requires_grad]
        if any(i not in sample for sample in kept for i in trained):
            raise DpivonError("posterior(): a parameter was thawed while samples were kept; collect them anew.")
        names = {i: str(k) for k, i in enumerate(trained)}
        if model is not None:
            known = {p: name for name, p in unwrap(model).named_parameters()}
            strangers = [i for i in trained if params[i] not in known]
            if strangers:
                problem = f"does not contain the optimizer's parameter number {strangers[0]}"
                fix = "Pass the model whose parameters the optimizer was given"
                raise bad("model", type(model).__name__, problem, fix)
            names = {i: known[params[i]] for i in trained}
        report = self.temperature()
        metadata = {
            "method": self.rule.name,
            "temperature": f"{report.effective:.6g}",
            "tempered": f"{report.tempered:.6g}",
        }
        return SampledPosterior({names[i]: torch.stack([s[i] for s in kept]) for i in trained}, metadata)

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
