"""IVON as a ``torch.optim.Optimizer``: a Gaussian posterior N(m, diag σ²) learned at about the cost of Adam."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import DpivonError, PrivacyError, bad, check_whole
from dpivon.optim import curvature as curvatures
from dpivon.optim.curvature import CurvatureEstimator, Evidence, memory_of
from dpivon.optim.ivon_rule import DEFAULTS, ivon_step, std, variance
from dpivon.optim.parameters import dense, follow, full_dtype, full_means, ready, restore
from dpivon.optim.prior import damping, dampings
from dpivon.optim.rule import check_hyper
from dpivon.optim.rule import debias as one_minus_power
from dpivon.optim.rule_optimizer import NO_GRADIENT, ReleaseOptimizer
from dpivon.optim.tensors import TensorList, in_parts
from dpivon.optim.theta import GradientAverage, Perturbation, ThetaSamples, set_aside
from dpivon.posterior import Posterior
from dpivon.release import Release
from dpivon.shards import local

MEMORY = "curvature_"  # what the estimator remembers, in the state of a parameter


class IVON(ReleaseOptimizer):
    """Improved Variational Online Newton (Shen et al., ICML 2024), ready for private gradients.

    >>> optimizer = IVON(model.parameters(), lr=0.1, ess=len(train_set))
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     with optimizer.sampled_params(train=True):
    ...         loss_fn(model(x), y).backward()
    ...     optimizer.step()

    The update is in :mod:`dpivon.optim.ivon_rule`. State lives in ``self.state`` per parameter (``step``,
    ``momentum``, ``hess`` and, for bf16 or fp16 parameters, an fp32 master ``mean``), all of it in ``state_dict()``.

    Args:
        params: parameters, named parameters, or parameter groups; every number below may differ by group, but for
            ``mc_samples``.
        lr: step size α.
        ess: effective sample size N_ess, usually the number of training examples: the posterior narrows as it grows.
        hess_init: initial curvature h₀ > 0.
        beta1: momentum of the gradient.
        beta2: momentum of the curvature.
        weight_decay: damping δ, the precision of the prior divided by N_ess.
        mc_samples: how many θ-samples a step uses. Enter ``sampled_params(train=True)`` as many times.
        curvature: ``"reparam"`` (IVON's own), ``"gradsq"``, ``"gradsq-corrected"`` (the paper's), any other of
            ``dpivon.optim.curvature.ESTIMATORS``, or an estimator.
            None means ``"reparam"`` without privacy and ``"gradsq-corrected"`` under ``dpivon.PrivacyEngine``.
        clip_radius: bound on each coordinate of the preconditioned step.
        debias: divide the momentum by 1 − β₁ᵗ.
        rescale_lr: multiply α by h₀ + δ, so that the first step has size α·g whatever h₀; the paper's α is without.
        hess_approx: upstream's name for ``curvature`` (``"price"`` or ``"gradsq"``), for those who migrate.
        curvature_decay: ρ of the averages over steps that some estimators keep (in the state, under ``curvature_…``).
        generator: source of the posterior samples; the device's default generator if None.
        prior: N(μ, diag v) in place of N(0, 1/(N_ess δ)): a :class:`dpivon.Posterior` or its file, of public or synthetic data
            or an earlier private training whose ε composes with this one's (:mod:`dpivon.optim.prior`). Steps pull towards μ
            with v's precision; the first mean stays the model's. ``weight_decay`` then only scales α (``rescale_lr``). Name the
            parameters: ``model.named_parameters()``. State keeps its prior: a resumed run has the one it was saved with.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        hess_init: float = DEFAULTS["hess_init"],
        beta1: float = DEFAULTS["beta1"],
        beta2: float = DEFAULTS["beta2"],
        weight_decay: float = DEFAULTS["weight_decay"],
        mc_samples: int = 1,
        curvature: str | CurvatureEstimator | None = None,
        clip_radius: float = math.inf,
        debias: bool = True,
        rescale_lr: bool = True,
        *,
        hess_approx: str | None = None,
        curvature_decay: float = DEFAULTS["curvature_decay"],
        generator: torch.Generator | None = None,
        prior: Posterior | str | os.PathLike[str] | None = None,
    ) -> None:
        if hess_approx is not None:
            if curvature is not None:
                raise bad("hess_approx", hess_approx, f"contradicts curvature={curvature!r}", "Give only one of them")
            curvature = hess_approx
        self.mc_samples = check_whole("mc_samples", mc_samples, "Use 1 unless you average several θ a step", at_least=1)
        self._curvature = None if curvature is None else curvatures.resolve(curvature)
        self.generator = generator
        self._inside: str | None = None  # "train" or "predict" while parameters are perturbed
        self._in_closure = False
        self._samples = ThetaSamples()
        self._average: GradientAverage | None = None
        self._warned_unsampled = False
        self._aside: list[Tensor] = []  # room for m while the parameters are perturbed
        numbers = {"lr": lr, "ess": ess, "hess_init": hess_init, "beta1": beta1, "beta2": beta2}
        numbers |= {"weight_decay": weight_decay, "clip_radius": clip_radius, "curvature_decay": curvature_decay}
        super().__init__(params, {**numbers, "debias": debias, "rescale_lr": rescale_lr})
        self._take_prior(prior)

    # ---- sampling

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Inside, the parameters are a sample θ ~ N(m, diag σ²); afterwards they are m again, whatever happened.

        ``train=True`` makes it a training sample: gradients taken inside belong to it until ``step()``. The default is
        a sample for prediction and never disturbs a pending training sample.
        """
        if self._inside is not None:
            if train and self._in_closure:  # step(closure) has sampled already
                yield
                return
            raise DpivonError(
                f"sampled_params(train={train}): already inside sampled_params; leave the outer `with` block first."
            )
        if train:
            self._fold_gradients()
            perturbation = self._samples.next(self._draw)
        else:
            perturbation = self._draw()
        here = [local(p) for p in perturbation.params]
        saved = self._aside = set_aside(here, self._aside)
        self._inside = "train" if train else "predict"
        try:
            self._perturb(saved, here, perturbation)
            yield
        except BaseException:
            if train:
                self._samples.withdraw()
            raise
        finally:
            self._inside = None
            with torch.no_grad():
                torch._foreach_copy_(here, saved)

    @torch.no_grad()
    def _draw(self) -> Perturbation:
        parts = []
        for group in self.param_groups:
            for params in in_parts([p for p in group["params"] if p.requires_grad]):
                states = self._states(params, group)
                hess = TensorList([state["hess"] for state in states])
                sigma = std(hess, ess=group["ess"], weight_decay=dampings(states, group))
                parts.append((params, self._standard_normals(hess) * sigma))
        return Perturbation(parts)

    @torch.no_grad()
    def _perturb(self, saved: list[Tensor], here: list[Tensor], perturbation: Perturbation) -> None:
        at = 0
        for params, epsilon in perturbation.parts:
            own = slice(at, at := at + len(params))
            means = TensorList(full_means(saved[own], [self.state[p] for p in params]))
            (means + epsilon).copy_to(here[own])

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, release: Release | None = None) -> Any:
        """Update the posterior from the gradients in ``p.grad``, or from a private ``release`` of them.

        A closure is evaluated at ``mc_samples`` posterior samples; its losses are averaged.
        """
        if self._inside is not None:
            raise DpivonError("step() inside sampled_params: the mean is not in place; call it after the `with` block.")
        self._check_release("IVON", release)
        loss = None if closure is None else self._run(closure)
        if release is None and self._average is not None:
            self._fold_gradients()  # the last of several θ-samples
        if release is not None and self.replayed is not None and self.replayed(release):
            return loss
        trained = self._trained(release)
        for group, params in trained:
            for some in in_parts(params):
                self._states(some, group)
                self._update(group, some, self._evidence(group, some, release))
        self.discard_samples()
        if not trained:
            raise DpivonError(NO_GRADIENT)
        return loss

    def _run(self, closure: Callable[[], Any]) -> Any:
        total = None
        self._in_closure = True
        try:
            for _ in range(self.mc_samples):
                with torch.enable_grad(), self.sampled_params(train=True):
                    loss = closure()
                total = loss if total is None else total + loss
        finally:
            self._in_closure = False
        return total if total is None else total / self.mc_samples

    def _update(self, group: dict[str, Any], params: list[Tensor], evidence: Evidence[TensorList]) -> None:
        states = [self.state[p] for p in params]
        for state in states:
            state["step"] += 1
        estimator = self.curvature
        if estimator.needs_sample and evidence.g_perturbation is None and not self._warned_unsampled:
            self._warned_unsampled = True
            warnings.warn(
                f"step() without sampled_params(train=True): the {estimator.name!r} estimator needs a θ-sample, so the "
                "curvature is left as it is. Take gradients inside `with optimizer.sampled_params(train=True):`.",
                stacklevel=4,
            )
        lr, beta1, t = group["lr"], group["beta1"], [state["step"] for state in states]
        memory = {n: TensorList([state[MEMORY + n] for state in states]) for n in memory_of(estimator)}
        here = [local(p) for p in params]
        before = {"mean": TensorList(full_means(here, states))}
        for key in ("momentum", "prior_mean") if "prior_mean" in states[0] else ("momentum",):
            before[key] = TensorList([state[key] for state in states])
        new = ivon_step(
            before,
            replace(evidence, t=t, memory=memory),
            estimator,
            lr=lr * (group["hess_init"] + group["weight_decay"]) if group["rescale_lr"] else lr,
            beta1=beta1,
            beta2=group["beta2"],
            debias=one_minus_power(beta1, t) if group["debias"] else 1.0,
            clip_radius=group["clip_radius"],
        )
        new["mean"].copy_to(here)
        kept = {"momentum": "momentum", "hess": "hess", **{n: MEMORY + n for n in memory}}
        for i, state in enumerate(states):
            state.update({key: new[name][i] for name, key in kept.items()})
            if "mean" in state:
                state["mean"] = new["mean"][i]

    def _evidence(self, group: dict[str, Any], params: list[Tensor], release: Release | None) -> Evidence[TensorList]:
        hess = TensorList([self.state[p]["hess"] for p in params])
        facts: dict[str, Any] = {
            "hess": hess,
            "ess": group["ess"],
            "weight_decay": dampings([self.state[p] for p in params], group),
            "decay": group["curvature_decay"],
        }
        if release is None and self._average is not None:
            g, g_squared, g_perturbation = self._average.means(params)
            return Evidence(g=g, g_squared=g_squared, g_perturbation=g_perturbation, noise_variance=0.0, **facts)
        raw = release.gradients if release is not None else {p: p.grad for p in params}
        g = TensorList([dense(raw[p]).to(h.dtype) for p, h in zip(params, hess, strict=True)])
        # K·g ⊙ mean(ε_k) = g ⊙ Σ ε_k: exact for one sample, unbiased for several of which only the average was released.
        shift = self._samples.shift(params) if self.curvature.needs_sample else None
        return Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=None if shift is None else g * shift,
            noise_variance=0.0 if release is None else release.variance,
            batch_size=None if release is None else release.batch_size,
            **facts,
        )

    # ---- gradients of several θ-samples, without privacy

    @torch.no_grad()
    def _fold_gradients(self) -> None:
        """Before p.grad is used for the next θ-sample, add what it holds for the last one to the average."""
        if self._private or not self._samples.used:
            return
        average = self._average or GradientAverage()
        if average.count == self._samples.used:
            return
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad and p.grad is not None]
        if any(getattr(p, "grad_sample", None) is not None for p in trained):
            raise PrivacyError(
                f"mc_samples={self.mc_samples}: per-example gradients are being collected but this IVON is not under "
                "dpivon.PrivacyEngine, so it would learn from raw gradients. Use dpivon.PrivacyEngine().make_private."
            )
        average.take(trained, self._samples.perturbations[self._samples.used - 1])
        self._average = average

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._inside is None and not self._private:
            if 0 < self._samples.used < self.mc_samples:
                self._fold_gradients()  # between two of the θ-samples of one step
            else:
                self.discard_samples()
        super().zero_grad(set_to_none)

    def _has_gradient(self, p: Tensor, release: Release | None) -> bool:
        if release is not None or self._average is None:
            return super()._has_gradient(p, release)
        return p in self._average.g

    # ---- what the release boundary calls

    def rewind_samples(self) -> None:
        """The next micro-batch of the same logical batch uses the same θ."""
        self._samples.rewind()

    def discard_samples(self) -> None:
        """Forget the θ-samples of the step under way, and what was learned at them."""
        self._samples.clear()
        self._average = None

    @property
    def samples_used(self) -> int:
        """How many training samples have been entered since the last step (or since the last rewind)."""
        return self._samples.used

    @property
    def inside_training_sample(self) -> bool:
        """Whether a training sample is in the parameters now."""
        return self._inside == "train"

    @property
    def samples_complete(self) -> int:
        """How many of this step's samples have been left, while more of them are to come or one is under way."""
        under_way = self._samples.used - self.inside_training_sample
        return under_way if under_way < self.mc_samples else 0

    # ---- the posterior

    @property
    def curvature(self) -> CurvatureEstimator:
        """The estimator in use: the one asked for, or the default for private or non-private training."""
        if self._curvature is not None:
            return self._curvature
        return curvatures.CorrectedSquaredGradient() if self._private else curvatures.Reparameterised()

    @torch.no_grad()
    def posterior(self, model: nn.Module | None = None) -> Posterior:
        """The posterior N(m, diag σ²) as it stands.

        Parameters are named as in ``model``, or as in ``named_parameters()`` if the optimizer was made from them,
        otherwise by position. Frozen parameters are not part of it. Of a sharded model every rank must ask for it.
        """
        if self._inside is not None:
            raise DpivonError("posterior() inside sampled_params: call it after the `with` block.")

        def width(p: Tensor, group: dict[str, Any]) -> Tensor:
            state = self._state(p, group)
            return variance(state["hess"], ess=group["ess"], weight_decay=damping(state, group))

        return self._gaussian(model, width, method="ivon", curvature=self.curvature.name)

    # ---- state

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter with all that a step needs: begun if it is empty, and where the parameter is now."""
        state: dict[str, Any] = self.state[p]
        estimator, here, dtype = self.curvature, local(p), full_dtype(p)
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(here, dtype=dtype, requires_grad=False)
            state["hess"] = torch.full_like(here, group["hess_init"], dtype=dtype, requires_grad=False)
        if "prior_mean" not in state:
            state.update(self._prior_of(p, group))
        for name in memory_of(estimator):
            if MEMORY + name not in state:
                if state["step"]:
                    raise DpivonError(
                        f"curvature={estimator.name!r}: the state has no {name!r} of its first {state['step']} steps; "
                        "it was made with another estimator. Go on with that one, or begin anew."
                    )
                state[MEMORY + name] = torch.zeros_like(here, dtype=dtype, requires_grad=False)
        follow(here, state)
        return state

    def _states(self, params: list[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        plain = not memory_of(self.curvature) and self._prior is None
        return [self.state[p] if plain and ready(self.state[p], p) else self._state(p, group) for p in params]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for key in ("debias", "rescale_lr"):
            group[key] = bool(group[key])
        for key in ("lr", "ess", "clip_radius", *DEFAULTS):
            group[key] = check_hyper(key, group[key])

    def state_dict(self) -> dict[str, Any]:
        if self._inside is not None:
            raise DpivonError("state_dict() inside sampled_params: the mean is not in place; call it after the block.")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        restore(self, state_dict)
        self.discard_samples()

    def __getstate__(self) -> dict[str, Any]:
        if self._inside is not None:
            raise DpivonError(
                "copying or pickling inside sampled_params: the mean is not in place; do it after the block."
            )
        own = ("mc_samples", "_curvature", "generator", "_private", "_prior", "_in_closure", "_warned_unsampled")
        state = super().__getstate__() | {key: getattr(self, key) for key in own}
        # A sample that is pending belongs to gradients that are not part of the copy.
        return state | {"_inside": None, "_samples": ThetaSamples(), "_average": None, "_aside": []}
