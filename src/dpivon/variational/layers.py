"""Layers whose weights are Gaussian, W ~ N(M, diag σ²), by local reparameterisation.

    z = M x + b + √(σ² x² + σ_b²) ⊙ ε,   ε ~ N(0, I), one for every row and output

A linear layer's output is Gaussian given its input, so the noise can be drawn where it matters: in the output. Every example
then has a draw of its own, rows stay independent, and the gradient has less variance than one W for the whole batch would give
(Kingma, Salimans and Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015). Where a weight is used at
several positions of one example (convolutions, sequences) each position gets its own ε: every output's distribution is right,
the correlation between positions that share W is left out, as is usual for Bayesian convolutions. Prediction draws weights.

The two parts are layers of their own, ``mean`` and ``spread``, and the noise stands outside both: what holds parameters is
deterministic, so per-example gradients are of exactly the pass that was made.

Standard deviations are trained in a coordinate r, Blundell's softplus (2015) in units of the initial width:

    σ(r) = σ₀ softplus(κ + a r),   softplus(κ) = 1,   a = c e/(e − 1),   so that σ(0) = σ₀ and σ′(0) = c σ₀

Clipping and privacy noise treat all coordinates alike, so the unit of r matters. The spread's gradient is about c σ₀ times the
mean's: with c σ₀ ≪ 1 the joint bound is spent on the mean, which carries the signal. Noise that moves r by d changes σ by the
fraction c d, whatever σ₀ is. Growth is linear in r, so that noise cannot make σ explode, as σ = exp(r) would.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.errors import bad, check_number
from dpivon.posterior import Posterior, unwrap

#: c, the relative slope σ′(0)/σ₀.
RATE = 2.0
_KAPPA = math.log(math.e - 1.0)
_A = RATE * math.e / (math.e - 1.0)
#: Added to an output's variance: √ has no slope at 0, where an input of zeros without a bias would put it.
_TINY = 1e-16


def std(r: Tensor, std0: float) -> Tensor:
    """σ(r)."""
    return F.softplus(r * _A + _KAPPA) * std0


def std_slope(r: Tensor, std0: float) -> Tensor:
    """σ′(r)."""
    return (r * _A + _KAPPA).sigmoid() * (_A * std0)


def variance_slope(r: Tensor, std0: float) -> Tensor:
    """dσ²/dr = 2 σ σ′."""
    return std(r, std0) * std_slope(r, std0) * 2.0


class Spread(nn.Module):
    """The variance of a Gaussian layer's output: the layer on x² with the weights' variances. ``weight`` and ``bias`` are r."""

    initial_std: float
    weight: Any
    bias: Any

    def start(self, initial_std: float) -> None:
        """Every weight gets the standard deviation σ₀."""
        self.initial_std = initial_std
        with torch.no_grad():
            for r in self.parameters():
                r.zero_()

    def std(self) -> dict[str, Tensor]:
        """σ of every parameter that has one, under the name that it has in the layer."""
        return {name: std(r, self.initial_std) for name, r in self.named_parameters()}

    def variances(self) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else std(self.bias, self.initial_std).square()
        return std(self.weight, self.initial_std).square(), bias

    def get_extra_state(self) -> Tensor:
        """σ₀ travels with the state: r means nothing without it."""
        return torch.tensor(self.initial_std, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.initial_std = float(state)


class SpreadLinear(Spread, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.square(), *self.variances())


class _SpreadConv(Spread):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x.square(), *self.variances())  # type: ignore[operator]


class SpreadConv1d(_SpreadConv, nn.Conv1d): ...


class SpreadConv2d(_SpreadConv, nn.Conv2d): ...


class SpreadConv3d(_SpreadConv, nn.Conv3d): ...


#: The layers that can be made Gaussian, and their spreads. Exactly these: a subclass may do something else.
SPREADS: dict[type[nn.Module], type[Spread]] = {
    nn.Linear: SpreadLinear,
    nn.Conv1d: SpreadConv1d,
    nn.Conv2d: SpreadConv2d,
    nn.Conv3d: SpreadConv3d,
}


class Variational(nn.Module):
    """A layer with Gaussian weights: ``mean`` is the layer it was, with M and b; ``spread`` holds the standard deviations.

    In training mode the output is a draw, in eval mode it is the one at the mean weights.
    """

    def __init__(self, layer: nn.Module, initial_std: float) -> None:
        super().__init__()
        self.mean = layer
        self.spread = _spread_like(layer, initial_std)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        m: Tensor = self.mean(x)
        if not self.training:
            return m
        v: Tensor = self.spread(x)
        return m + (v + _TINY).sqrt() * self.noise(v)

    def noise(self, v: Tensor) -> Tensor:
        """ε, independent for every row and output. Not privacy noise, and never counted as such."""
        return torch.randn_like(v)

    @property
    def weight(self) -> Tensor:
        """M, for code that looks at a layer's weight."""
        return cast(Tensor, self.mean.weight)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.mean.bias)


def _spread_like(layer: nn.Module, initial_std: float) -> Spread:
    """A spread for the layer's weight, and for its bias if that is trained."""
    make = SPREADS[type(layer)]
    bias = layer.bias is not None and layer.bias.requires_grad
    like = {"bias": bias, "device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        spread = make(layer.in_features, layer.out_features, **like)
    else:
        shape = [
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        ]
        spread = make(**{name: getattr(layer, name) for name in shape}, **like)
    spread.start(initial_std)
    return spread


_DTYPES = (torch.float32, torch.float64)


def variational(model: nn.Module, *, initial_std: float = 0.02) -> nn.Module:
    """A copy of ``model`` whose linear and convolution layers have Gaussian weights, N(M, σ₀² I) at the start.

    M starts at the model's weights. Weights and biases of these layers become Gaussian; all else that is trained (norm layers,
    embeddings, attention's packed projections) stays a point estimate, and what is frozen stays as it is. The model itself is
    left alone: it fits the posterior that training gives.

    Args:
        initial_std: σ₀, the standard deviation of every Gaussian weight before training. Wide posteriors from the first step
            cost accuracy: keep it well below the weights' own size.
    """
    initial_std = check_number("initial_std", initial_std, "Use a width such as 0.02", above=0.0)
    model = unwrap(model)
    if is_variational(model):
        raise bad("model", type(model).__name__, "has Gaussian layers already", "Pass the plain model, and only once")
    _check_no_ties(model)
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}  # one for a layer that stands in several places

    def replace(module: nn.Module) -> nn.Module:
        if type(module) in SPREADS and module.weight.requires_grad:
            if module not in made:
                made[module] = Variational(module, initial_std)
            return made[module]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = replace(child)
        return module

    model = replace(model)
    if not made:
        fix = "Use a model with a trainable nn.Linear or nn.Conv layer"
        raise bad("model", type(model).__name__, "has no layer that can be made Gaussian", fix)
    return model


def is_variational(model: nn.Module) -> bool:
    """Whether the model has Gaussian layers, wrapped or not."""
    return any(isinstance(module, Variational) for module in unwrap(model).modules())


def plain(model: nn.Module) -> nn.Module:
    """A copy of a variational model with ordinary layers at the mean weights. Hooks, the private ones too, stay behind."""
    tensors: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}

    def own(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if id(t) not in tensors:
            new = t.detach().clone()
            tensors[id(t)] = nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
        return tensors[id(t)]

    def bare(module: nn.Module) -> nn.Module:
        if isinstance(module, Variational):
            module = module.mean
        if id(module) in modules:
            return modules[id(module)]
        new = module.__class__.__new__(module.__class__)
        modules[id(module)] = new
        # An instance's own `forward` is what a gradient collector put over the class's.
        kept = {k: v for k, v in module.__dict__.items() if k not in ("forward", "autograd_grad_sample_hooks")}
        new.__dict__.update({k: OrderedDict() if k.endswith("_hooks") else v for k, v in kept.items()})
        for hooks in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
            new.__dict__[hooks] = OrderedDict()
        new._parameters = {name: own(p) for name, p in module._parameters.items()}  # type: ignore[misc]
        new._buffers = {name: own(b) for name, b in module._buffers.items()}
        new._modules = {name: None if child is None else bare(child) for name, child in module._modules.items()}
        return new

    return bare(unwrap(model))


@torch.no_grad()
def posterior(
    model: nn.Module, metadata: dict[str, str] | None = None, value: Callable[[Tensor], Tensor] | None = None
) -> Posterior:
    """The Gaussian posterior of a variational model, under the names of the plain one; points have variance 0.

    ``value(p)`` is what a parameter stands for, if an optimizer knows it in more digits than p has.
    """
    of = _storable if value is None else lambda p: _storable(value(p))
    layers = [module for module in unwrap(model).modules() if isinstance(module, Variational)]
    widths = {
        getattr(layer.mean, name): std(of(r), layer.spread.initial_std)
        for layer in layers
        for name, r in layer.spread.named_parameters()
    }
    trained = {name: p for name, p in plain_parameters(model).items() if p.requires_grad}
    mean = {name: of(p) for name, p in trained.items()}
    variance = {
        name: widths[p].square() if p in widths else torch.zeros_like(mean[name]) for name, p in trained.items()
    }
    return Posterior(mean, variance, metadata or {"method": "bbp"})


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that the plain model has, under its names; of a model without Gaussian layers simply its own."""
    out: dict[str, Tensor] = {}
    places = {path: module for path, module in unwrap(model).named_modules() if isinstance(module, Variational)}
    for name, p in unwrap(model).named_parameters():
        holder, _, own = name.rpartition(".")
        place, _, part = holder.rpartition(".")
        if place in places and part == "mean":
            out[f"{place}.{own}" if place else own] = p
        elif place not in places or part != "spread":
            out[name] = p
    return out


def _storable(t: Tensor) -> Tensor:
    return t.detach().clone().to(t.dtype if t.dtype in _DTYPES else torch.float32)


def _check_no_ties(model: nn.Module) -> None:
    """One weight under two layers would get two spreads."""
    holders = [m for m in model.modules() if type(m) in SPREADS]
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for module in holders:
        for name, p in module._parameters.items():
            if p is not None and uses[id(p)] > 1:
                fix = "Untie the weights, or use the same layer object in both places"
                raise bad("model", name, f"of a {type(module).__name__} is shared with another layer", fix)
