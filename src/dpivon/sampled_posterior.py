"""A posterior that is a list of weight sets, as a sampler leaves it: q(θ) = (1/S) Σ_s δ(θ − θ_s).

Everything here is post-processing of numbers that were already released, so it spends no privacy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpivon.errors import ArgumentError, bad
from dpivon.posterior import Posterior, check_metadata, check_tensor, model_names
from dpivon.tensor_files import read_tensors, write_tensors

_FORMAT_KEY = "dpivon_sampled_posterior"
_FORMAT_VERSION = "1"


@dataclass(frozen=True, eq=False, repr=False)
class SampledPosterior:
    """S equally weighted samples of a network's weights, as a chain leaves them (:class:`dpivon.LangevinDynamics`).

    The tensors are detached but not copied.

    Attributes:
        samples: a tensor [S, *shape] for each of the model's trained parameters, by name.
        metadata: free text that travels with a saved file.
    """

    samples: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.samples:
            raise bad("samples", self.samples, "has no parameters", "Pass at least one named tensor")
        for name, t in self.samples.items():
            check_tensor(f"samples[{name!r}]", t)
        counts = {name: len(t) if t.ndim else 0 for name, t in self.samples.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            problem = "must be the same number of samples for every parameter, and at least one"
            raise bad("samples", counts, problem, "Stack the samples along the first dimension")
        check_metadata(self.metadata, _FORMAT_KEY)
        object.__setattr__(self, "samples", {name: t.detach() for name, t in self.samples.items()})
        object.__setattr__(self, "metadata", dict(self.metadata))

    def __len__(self) -> int:
        return len(next(iter(self.samples.values())))

    def __repr__(self) -> str:
        return f"SampledPosterior({len(self)} samples of {self.num_parameters} parameters, {self.metadata})"

    @property
    def mean(self) -> dict[str, Tensor]:
        """The average of the samples, by name."""
        return {name: t.mean(0) for name, t in self.samples.items()}

    @property
    def variance(self) -> dict[str, Tensor]:
        """The variance of each weight over the samples (divided by S: of the mixture itself)."""
        return {name: t.var(0, correction=0) for name, t in self.samples.items()}

    @property
    def std(self) -> dict[str, Tensor]:
        """The standard deviation of each weight over the samples."""
        return {name: v.sqrt() for name, v in self.variance.items()}

    @property
    def num_parameters(self) -> int:
        """How many scalar weights the posterior is over."""
        return sum(t[0].numel() for t in self.samples.values())

    def __getitem__(self, s: int) -> dict[str, Tensor]:
        """The weights θ_s."""
        return {name: t[s] for name, t in self.samples.items()}

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """One of the samples, each with the same probability."""
        device = None if generator is None else generator.device
        return self[int(torch.randint(len(self), (), generator=generator, device=device))]

    def gaussian(self) -> Posterior:
        """The mean-field Gaussian with the samples' mean and variances."""
        return Posterior(self.mean, self.variance, self.metadata)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SampledPosterior:
        """The same samples on another device or in the other precision (float32 or float64)."""
        moved = {name: t.to(device=device, dtype=dtype) for name, t in self.samples.items()}
        return SampledPosterior(moved, self.metadata)

    def matches(self, model: nn.Module) -> bool:
        """True when names and shapes fit ``model``; otherwise an error naming the first that does not."""
        self.for_model(model)
        return True

    def for_model(self, model: nn.Module) -> SampledPosterior:
        """As :meth:`Posterior.for_model`."""
        names = model_names({name: t.shape[1:] for name, t in self.samples.items()}, model)
        return SampledPosterior({name: self.samples[own] for own, name in names.items()}, self.metadata)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; a crash half-way leaves whatever was at ``path`` before."""
        tensors = {f"sample.{name}": t for name, t in self.samples.items()}
        write_tensors(path, tensors, {**self.metadata, _FORMAT_KEY: _FORMAT_VERSION})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SampledPosterior:
        """Read what :meth:`save` wrote, onto the CPU. Only safetensors is read: nothing is unpickled."""
        fix = "Pass a file written by SampledPosterior.save"
        what = "sampled posterior"
        tensors, metadata = read_tensors(path, key=_FORMAT_KEY, version=_FORMAT_VERSION, what=what, fix=fix)
        for key in tensors:
            if not key.startswith("sample.") or key == "sample.":
                raise bad("path", str(path), f"holds {key!r}, which is no sample of a parameter", fix)
        try:
            return cls({key.removeprefix("sample."): t for key, t in tensors.items()}, metadata)
        except ArgumentError as error:
            raise bad("path", str(path), f"holds no valid samples ({error})", fix) from None
