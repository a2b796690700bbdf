"""Dropout as a posterior: a network with some of its units switched off is a draw of its weights.

    θ_s = M diag(z_s) / (1 − p),   z_s ~ Bernoulli(1 − p) for every unit

Training with dropout and weight decay fits the variational family of such θ; prediction keeps the dropout live and averages
over draws (Gal and Ghahramani, *Dropout as a Bayesian Approximation*, 2016). Under privacy it is an ordinary network under
DP-SGD or DP-Adam: masks are drawn for every row by itself, from the shape of the batch alone, so examples do not mix.

In prediction a draw is one mask for each dropout layer, shared by all examples: one network, as a draw of weights would be, so
that predictions for several inputs are jointly meaningful and do not depend on how they are batched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import bad, check_number
from dpivon.optim.parameters import full_mean
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.posterior import Posterior, unwrap

_ELEMENTS = (nn.Dropout,)
_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_OTHERS = (nn.AlphaDropout, nn.FeatureAlphaDropout)
_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KEY, _LIVE = "dropout", "live"


class Dropped(nn.Sequential):
    """Dropout, then the layer: ``0`` and ``1``."""

    @property
    def weight(self) -> Any:
        return self[1].weight

    @property
    def bias(self) -> Any:
        return self[1].bias


def with_dropout(model: nn.Module, p: float = 0.05) -> nn.Module:
    """A copy of ``model`` with dropout before every linear and convolution layer but the first, as Gal and Ghahramani have it.

    The first layer's input is the data, and stays whole; which one is first is read off the order of ``model.modules()``.
    """
    p = check_number("p", p, "Use a probability such as 0.05", at_least=0.0, below=1.0)
    model = copy.deepcopy(unwrap(model))
    if dropouts(model):
        fix = "Use the model as it is, or take its dropout layers out"
        raise bad("model", type(model).__name__, "has dropout layers of its own", fix)
    layers = [module for module in model.modules() if type(module) in _WEIGHTS]
    if len(layers) < 2:
        fix = "Use a network with a hidden layer"
        raise bad("model", f"{len(layers)} linear or convolution layer(s)", "leaves no place for dropout", fix)
    made: dict[nn.Module, nn.Module] = {layer: Dropped(nn.Dropout(p), layer) for layer in layers[1:]}
    for parent in [m for m in model.modules() if m not in made.values()]:
        for name, child in list(parent._modules.items()):
            if child in made:
                parent._modules[name] = made[child]
    return model.train(model.training)


def dropouts(model: nn.Module) -> list[nn.Module]:
    """The layers that drop anything."""
    kinds = (*_ELEMENTS, *_CHANNELS, *_OTHERS)
    found = [m for m in unwrap(model).modules() if isinstance(m, kinds) and m.p > 0]
    return found + [m for m in unwrap(model).modules() if isinstance(m, nn.MultiheadAttention) and m.dropout > 0]


def dropout_posterior(
    model: nn.Module, metadata: dict[str, str] | None = None, value: Callable[[Tensor], Tensor] | None = None
) -> Posterior:
    """The trained weights, marked so that :func:`dpivon.predict` keeps the model's dropout live.

    ``value(p)`` is what a parameter stands for, if an optimizer knows it in more digits than p has.
    """
    _check_drawable(model)
    mean = Posterior.point(model).mean
    if value is not None:
        params = dict(unwrap(model).named_parameters())
        mean = {name: value(params[name]).detach().to(m, copy=True) for name, m in mean.items()}
    variance = {name: torch.zeros_like(m) for name, m in mean.items()}
    return Posterior(mean, variance, {"method": "mc-dropout", **(metadata or {}), _KEY: _LIVE})


def is_live(posterior: Any) -> bool:
    return bool(posterior.metadata.get(_KEY) == _LIVE)


class MCDropout(RuleOptimizer):
    """A rule for a network with dropout, whose posterior is that network with its dropout live."""

    def posterior(self, model: nn.Module | None = None) -> Posterior:
        if model is None:
            raise bad("model", None, "is needed", "Pass the model with dropout that this optimizer trains")
        return dropout_posterior(model, value=lambda p: full_mean(p, self.state.get(p, {})))


class LiveDropout:
    """Masks of one draw at a time, for a network in eval mode; layers that drop nothing then get a mask after all."""

    def __init__(self, model: nn.Module) -> None:
        _check_drawable(model)
        self._layers = dropouts(model)
        self._generator: torch.Generator | None = None

    @contextmanager
    def draw(self, seed: int, device: torch.device) -> Iterator[None]:
        """Inside, forward passes are through the network that ``seed`` draws."""
        self._generator = torch.Generator(device).manual_seed(seed)
        handles = [layer.register_forward_hook(self._mask) for layer in self._layers]
        # In eval mode torch's transformer layers take a fused path that goes around their dropout layers.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for handle in handles:
                handle.remove()

    def _mask(self, layer: Any, args: Any, output: Tensor) -> Tensor:
        assert self._generator is not None
        shape = output.shape[1:2] + (1,) * (output.dim() - 2) if isinstance(layer, _CHANNELS) else output.shape[1:]
        if layer.p == 1.0:
            return torch.zeros_like(output)
        keep = torch.rand((1, *shape), generator=self._generator, device=self._generator.device) >= layer.p
        return output * (keep.to(output) / (1.0 - layer.p))


def _check_drawable(model: nn.Module) -> None:
    found = dropouts(model)
    if not found:
        fix = "Make it with dpivon.dropout.with_dropout(model), or put nn.Dropout in it"
        raise bad("model", type(unwrap(model)).__name__, "has no dropout that could be live", fix)
    for layer in found:
        if not isinstance(layer, (*_ELEMENTS, *_CHANNELS)):
            fix = "Use nn.Dropout or nn.Dropout1d/2d/3d in its place, and dropout=0 in attention"
            raise bad("model", type(layer).__name__, "drops in a way that prediction cannot draw", fix)
