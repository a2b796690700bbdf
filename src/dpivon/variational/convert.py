"""From a model to one with Gaussian weights, and back to the model and its posterior."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import bad, check_number
from dpivon.posterior import Posterior, unwrap
from dpivon.variational.layers import SPREADS, Variational, std

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
