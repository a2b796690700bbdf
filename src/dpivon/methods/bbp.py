"""DP-Bayes-by-Backprop."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dpivon.methods.base import Method, Setup
from dpivon.variational import BayesByBackprop, variational


def _build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    options = dict(setup.options)
    made = variational(model, initial_std=options.pop("initial_std"))
    return made, BayesByBackprop(
        made, lr=setup.lr, dataset_size=setup.dataset_size, generator=setup.generator, **options
    )


METHODS = (
    Method(
        name="dp-bbp",
        title="DP-BBP",
        summary="Gaussian weights by reparameterisation, KL after release",
        optimises="mean and standard deviation of a Gaussian, by Adam",
        posterior="diagonal Gaussian over linear and convolution layers, the rest points",
        predicts="average over weight draws",
        choose="an explicit variational objective with a prior; twice the parameters and twice the time of DP-SGD",
        reference="Blundell et al. 2015; Zhang et al. 2023",
        lr=0.01,
        build=_build,
        defaults={
            "initial_std": 0.02,
            "prior_std": 1.0,
            "temperature": 1.0,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
        },
        samples=32,
    ),
)
