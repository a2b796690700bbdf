"""A deep ensemble of K private runs, with the budget that publishing all of them costs.

Lakshminarayanan et al., *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*, 2017. Every member
learns from the same people, so the guarantee of the ensemble is that of all releases of all members together: with K
equal members of T steps, that of one run of K·T steps. At a fixed joint ε each member gets more noise than a single run
would; an ensemble that states the ε of one member understates its cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpivon.errors import bad, check_whole
from dpivon.predict import ClassPrediction, predict, prediction_of
from dpivon.privacy.accounting import Accountant, budget
from dpivon.stacked.networks import Network
from dpivon.stacked.run import Run
from dpivon.stacked.stack import Stack


def joint_epsilon(stack: Stack, delta: float) -> float:
    """ε of everything that all runs of the stack have released together."""
    joint = Accountant()
    for accountant in stack.mechanism.accountants:
        for sigma, rate, steps in accountant.history:
            joint.charge(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    return joint.get_epsilon(delta)


def ensemble_noise(
    members: int, *, target_epsilon: float, delta: float, dataset_size: int, batch_size: int, steps: int
) -> float:
    """The σ with which ``members`` runs of so many steps each spend at most (ε, δ) together."""
    members = check_whole("members", members, "Use the number of runs", at_least=1)
    steps = check_whole("steps", steps, "Use the number of steps of each run", at_least=1)
    return budget(
        dataset_size=dataset_size,
        batch_size=batch_size,
        steps=members * steps,
        delta=delta,
        target_epsilon=target_epsilon,
    ).noise_multiplier


class Ensemble:
    """K runs that differ in nothing but their seed, trained as one stack and predicting as one mixture.

    >>> sigma = ensemble_noise(5, target_epsilon=8, delta=1e-5, dataset_size=n, batch_size=512, steps=1000)
    >>> ensemble = Ensemble(Run("dp-sgd", 0, sigma, 1.0, 0.1, 512), range(5), PaperNetwork(), images, labels)
    >>> for done in ensemble.train(1000): ...
    >>> ensemble.epsilon(1e-5), ensemble.member_epsilon(1e-5)

    Args:
        run: what every member is; its seed is not used.
        seeds: make the privacy noise: as secret as that of a single run, and never used again for another one.
        network: as for :class:`~dpivon.stacked.Stack`, like the rest.
        images: one example per row.
        labels: one per example.
        **options: of the stack.
    """

    def __init__(
        self, run: Run, seeds: Sequence[int], network: Network, images: Tensor, labels: Tensor, **options: Any
    ) -> None:
        if len(seeds) < 2 or len(set(seeds)) < len(seeds):
            raise bad("seeds", list(seeds), "must be two or more, all different", "Give each member its own")
        self.stack = Stack([replace(run, seed=seed) for seed in seeds], network, images, labels, **options)
        self.averaged = run.averaged

    def __len__(self) -> int:
        return len(self.stack.runs)

    def train(self, steps: int) -> Iterator[int]:
        """As :meth:`Stack.train`."""
        return self.stack.train(steps)

    def epsilon(self, delta: float) -> float:
        """ε of the whole ensemble: the composition of all members' releases."""
        return joint_epsilon(self.stack, delta)

    def member_epsilon(self, delta: float) -> float:
        """ε of one member by itself: what would be spent if only that one were ever used."""
        return self.stack.epsilon(0, delta)

    def predict(self, x: Tensor, samples: int = 0, *, generator: torch.Generator | None = None) -> ClassPrediction:
        """The equal mixture of the members, each of ``samples`` draws of its own posterior (0: its mean).

        p = mean_k p_k, and the mutual information is H[p] minus the members' expected entropies.
        """
        parts = [
            predict(
                self.stack.model(i), self.stack.posterior(i, averaged=self.averaged), x, samples, generator=generator
            )
            for i in range(len(self))
        ]
        probs = torch.stack([part.probs for part in parts]).double().mean(0)
        expected = torch.stack([part.entropy - part.mutual_information for part in parts]).double().mean(0)
        return prediction_of(probs, expected, sum(max(part.samples, 1) for part in parts), parts[0].probs.dtype)
