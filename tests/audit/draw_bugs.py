"""Bugs of what is drawn: the same noise or batches in a fork or a copy, θ drawn for every batch, noise of too few bits."""

from __future__ import annotations

from typing import Any

import torch
from program_bugs import normals
from sowing import Patch, attr, both, everywhere
from torch import Tensor

import dpivon.privacy.temperature as temperature
from dpivon.privacy.noise import OfOneProcess, TorchNoise
from dpivon.privacy.sampling import PoissonSampler
from dpivon.privacy.streams import PRIVACY, Streams

_RANKS = "its ranks are processes that the auditor neither forks nor copies"


def forks_go_on_alike() -> dict[str, Patch | str]:
    """Nobody notices a fork, so parent and child go on from one state."""
    blind = attr(OfOneProcess, "_here", lambda original: lambda self: None)
    return everywhere(blind, blind, distributed=_RANKS)


def copies_draw_alike() -> dict[str, Patch | str]:
    """A deep copy has the original's generator, or its seeds."""

    def sampler(original: Any) -> Any:
        def copied(self: Any, memo: Any) -> Any:
            new = object.__new__(type(self))
            new.__dict__.update(self.__dict__)
            new._generator = torch.Generator()
            new._generator.set_state(self._generator.get_state())
            return new

        return copied

    def streams(original: Any) -> Any:
        return lambda self: (Streams, (self.seeds, self.device))

    return everywhere(
        attr(PoissonSampler, "__deepcopy__", sampler), attr(Streams, "__reduce__", streams), distributed=_RANKS
    )


def noise_by_the_state_alone() -> dict[str, Patch | str]:
    """Whatever the sum, the noise after a resume is that of the state in the checkpoint."""

    def branch(original: Any) -> Any:
        return lambda self, material: None

    return everywhere(
        attr(TorchNoise, "branch", branch), "a stack refuses to go on at another learning rate", distributed=_RANKS
    )


def theta_for_every_batch() -> dict[str, Patch | str]:
    def anew(original: Any) -> Any:
        return lambda predictor, options: lambda x: predictor.predict(x, **options).probs

    def unchecked(original: Any) -> Any:
        return lambda *given: None

    patch = both(attr(temperature, "_one_function", anew), attr(temperature, "_check_rows_alone", unchecked))
    return everywhere(patch, patch)


def noise_of_24_bits() -> dict[str, Patch | str]:
    def engine(original: Any) -> Any:
        return lambda self, like, std: original(self, like.float(), std).to(like.dtype)

    def stacks(original: Any) -> Any:
        def normal(self: Any, out: Tensor, step: Tensor, stream: int) -> Tensor:
            if stream != PRIVACY:
                return original(self, out, step, stream)
            return out.copy_(original(self, out.float(), step, stream))

        return normal

    eager, program = attr(TorchNoise, "normal", engine), normals(lambda draw, self, like: draw(like.float()).to(like))
    stack = attr(Streams, "normal", stacks)
    return everywhere(eager, stack, distributed=_RANKS, compiled=both(eager, program))
