"""The trained object: a posterior over a network's weights, either mean-field Gaussian or a set of samples.

Everything here is post-processing of numbers that were already released, so it spends no privacy.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.durable.tensors import bytes_of, read_tensors, write_tensors
from dpivon.errors import ArgumentError, bad
from dpivon.shards import local, whole

_GAUSSIAN, _SAMPLED, _VERSION = "dpivon_posterior", "dpivon_sampled_posterior", "1"  # file formats
_DTYPES = (torch.float32, torch.float64)


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside an Opacus wrapper, or ``model`` itself."""
    # By class name: importing opacus here would slow every import of dpivon, and a network of the
    # caller's own may well have a child that happens to be called _module.
    while any("GradSampleModule" in kind.__name__ for kind in type(model).__mro__):
        inner = getattr(model, "_module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


class _Weights:
    """What both kinds of posterior share."""

    mean: Any
    variance: Any
    for_model: Any

    @property
    def std(self) -> dict[str, Tensor]:
        """The standard deviation of each weight, by name."""
        return {name: v.sqrt() for name, v in self.variance.items()}

    @property
    def digest(self) -> str:
        """A short fingerprint of names, means and variances."""
        total, mean, variance = hashlib.sha256(), self.mean, self.variance
        for name in sorted(mean):
            total.update(name.encode() + bytes_of(mean[name]) + bytes_of(variance[name]))
        return total.hexdigest()[:16]

    def matches(self, model: nn.Module) -> bool:
        """True when names and shapes fit ``model``; otherwise an error naming the first that does not."""
        self.for_model(model)
        return True


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(_Weights):
    """q(θ) = N(m, diag(v)) over a network's weights.

    >>> posterior = optimizer.posterior(model)
    >>> posterior.save("posterior.safetensors")
    >>> predict(model, Posterior.load("posterior.safetensors"), x)

    Only what was trained is in it: buffers and frozen parameters come from the model at prediction
    time. The tensors are detached but not copied; v = 0 is a point estimate.

    Attributes:
        mean: m, by the model's parameter names.
        variance: v, by the same names.
        metadata: free text that travels with a saved file.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.mean:
            raise bad("mean", self.mean, "has no parameters", "Pass at least one named tensor")
        for name in [*self.mean, *self.variance]:
            if name not in self.mean or name not in self.variance:
                there, missing = ("mean", "variance") if name in self.mean else ("variance", "mean")
                fix = "Give mean and variance the same names"
                raise bad(missing, sorted(getattr(self, missing)), f"lacks {name!r}, which {there} has", fix)
            _check_pair(name, self.mean[name], self.variance[name])
        _check_metadata(self.metadata, _GAUSSIAN)
        # New dicts: adding to the ones the caller passed must not slip past the checks above.
        object.__setattr__(self, "mean", {name: m.detach() for name, m in self.mean.items()})
        object.__setattr__(self, "variance", {name: self.variance[name].detach() for name in self.mean})
        object.__setattr__(self, "metadata", dict(self.metadata))

    def __repr__(self) -> str:
        return f"Posterior({self.num_parameters} parameters, {len(self.mean)} tensors, {self.metadata})"

    @classmethod
    def point(cls, model: nn.Module) -> Posterior:
        """N(θ, 0) around a copy of ``model``'s parameters θ, for baselines that are point estimates.

        It holds the trainable parameters, or all of them when the whole model is frozen.
        """
        everything = dict(unwrap(model).named_parameters())
        chosen = {name: p for name, p in everything.items() if p.requires_grad} or everything
        if not chosen:
            raise bad("model", type(model).__name__, "has no parameters", "Pass the network that was trained")
        mean = {
            name: whole(local(p).detach().clone(), p).to(p.dtype if p.dtype in _DTYPES else torch.float32)
            for name, p in chosen.items()
        }
        variance = {name: torch.zeros_like(m) for name, m in mean.items()}
        return cls(mean, variance, {"method": "point"})

    @property
    def has_width(self) -> bool:
        """Whether every weight has a variance above 0, so that it can be a prior."""
        return all(bool((v > 0).all()) for v in self.variance.values())

    @property
    def num_parameters(self) -> int:
        """How many scalar weights the posterior is over."""
        return sum(m.numel() for m in self.mean.values())

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """One draw θ = m + √v·ε with ε ~ N(0, I).

        ε is made on the generator's device, so a CPU generator gives the same draw on every device.
        """
        theta = {}
        # In sorted order: a file does not keep the order of its tensors, and a seed has to give the
        # same draw before saving and after loading.
        for name in sorted(self.mean):
            m, v = self.mean[name], self.variance[name]
            device = m.device if generator is None else generator.device
            epsilon = torch.randn(m.shape, generator=generator, device=device, dtype=m.dtype)
            theta[name] = torch.addcmul(m, v.sqrt(), epsilon.to(m.device))
        return {name: theta[name] for name in self.mean}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """The same posterior on another device or in the other precision (float32 or float64)."""
        return Posterior(
            {name: m.to(device=device, dtype=dtype) for name, m in self.mean.items()},
            {name: v.to(device=device, dtype=dtype) for name, v in self.variance.items()},
            self.metadata,
        )

    def for_model(self, model: nn.Module) -> Posterior:
        """This posterior under ``model``'s parameter names, or an error naming the first misfit.

        An optimizer that was given bare tensors knows no names and calls them "0", "1", …: those are
        matched in order to the model's trainable parameters.
        """
        names = _model_names({name: m.shape for name, m in self.mean.items()}, model)
        if all(own == theirs for own, theirs in names.items()):
            return self
        return Posterior(
            {name: self.mean[own] for own, name in names.items()},
            {name: self.variance[own] for own, name in names.items()},
            self.metadata,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; a crash half-way leaves whatever was at ``path`` before."""
        parts = (("mean", self.mean), ("variance", self.variance))
        tensors = {f"{part}.{name}": t for part, named in parts for name, t in named.items()}
        write_tensors(path, tensors, {**self.metadata, _GAUSSIAN: _VERSION})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Posterior:
        """Read what :meth:`save` wrote, onto the CPU. Only safetensors is read: nothing is unpickled."""
        fix = "Pass a file written by Posterior.save"
        tensors, metadata = read_tensors(path, key=_GAUSSIAN, version=_VERSION, what="posterior", fix=fix)
        named: dict[str, dict[str, Tensor]] = {"mean": {}, "variance": {}}
        for key, t in tensors.items():
            part, _, name = key.partition(".")
            if part not in named or not name:
                raise bad("path", str(path), f"holds {key!r}, which is no posterior tensor", fix)
            named[part][name] = t
        try:
            return cls(named["mean"], named["variance"], metadata)
        except ArgumentError as error:
            raise bad("path", str(path), f"holds no valid posterior ({error})", fix) from None


@dataclass(frozen=True, eq=False, repr=False)
class SampledPosterior(_Weights):
    """q(θ) = (1/S) Σ_s δ(θ − θ_s): equally weighted samples, as a chain leaves them (:class:`dpivon.LangevinDynamics`).

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
            _check_tensor(f"samples[{name!r}]", t)
        counts = {name: len(t) if t.ndim else 0 for name, t in self.samples.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            problem = "must be the same number of samples for every parameter, and at least one"
            raise bad("samples", counts, problem, "Stack the samples along the first dimension")
        _check_metadata(self.metadata, _SAMPLED)
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

    def for_model(self, model: nn.Module) -> SampledPosterior:
        """As :meth:`Posterior.for_model`."""
        names = _model_names({name: t.shape[1:] for name, t in self.samples.items()}, model)
        return SampledPosterior({name: self.samples[own] for own, name in names.items()}, self.metadata)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; a crash half-way leaves whatever was at ``path`` before."""
        tensors = {f"sample.{name}": t for name, t in self.samples.items()}
        write_tensors(path, tensors, {**self.metadata, _SAMPLED: _VERSION})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SampledPosterior:
        """Read what :meth:`save` wrote, onto the CPU. Only safetensors is read: nothing is unpickled."""
        fix = "Pass a file written by SampledPosterior.save"
        what = "sampled posterior"
        tensors, metadata = read_tensors(path, key=_SAMPLED, version=_VERSION, what=what, fix=fix)
        for key in tensors:
            if not key.startswith("sample.") or key == "sample.":
                raise bad("path", str(path), f"holds {key!r}, which is no sample of a parameter", fix)
        try:
            return cls({key.removeprefix("sample."): t for key, t in tensors.items()}, metadata)
        except ArgumentError as error:
            raise bad("path", str(path), f"holds no valid samples ({error})", fix) from None


def _model_names(shapes: dict[str, torch.Size], model: nn.Module) -> dict[str, str]:
    """The model's name for each of a posterior's tensors, or an error naming the first misfit."""
    from dpivon.variational.layers import plain_parameters  # here: it makes posteriors itself

    params = plain_parameters(model)
    if all(name.isdecimal() for name in shapes) and not shapes.keys() <= params.keys():
        return _by_position(shapes, {name: p for name, p in params.items() if p.requires_grad})
    fix = "Pass the model this posterior was trained on"
    for name, shape in shapes.items():
        if name not in params:
            raise bad("posterior", name, "is no parameter of the model", fix)
        if shape != params[name].shape:
            problem = f"has shape {tuple(shape)} but the model's has {tuple(params[name].shape)}"
            raise bad("posterior", name, problem, fix)
    for name, p in params.items():
        if p.requires_grad and name not in shapes:
            fix_or_freeze = f"{fix}, or freeze that parameter with requires_grad_(False)"
            raise bad("model", name, "is trainable but not in the posterior", fix_or_freeze)
    return {name: name for name in shapes}


def _by_position(shapes: dict[str, torch.Size], trainable: dict[str, Tensor]) -> dict[str, str]:
    fix = "Call optimizer.posterior(model) to get one with the model's names"
    positions = sorted(shapes, key=int)
    if positions != [str(i) for i in range(len(trainable))]:
        problem = f"does not number the model's {len(trainable)} trainable parameters one by one"
        raise bad("posterior", positions, problem, fix)
    names = dict(zip(positions, trainable, strict=True))
    for position, name in names.items():
        if shapes[position] != trainable[name].shape:
            problem = f"has shape {tuple(shapes[position])} but the model's {name!r} has {tuple(trainable[name].shape)}"
            raise bad("posterior", position, problem, fix)
    return names


def _check_metadata(metadata: dict[str, str], reserved: str) -> None:
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise bad("metadata", {key: text}, "must map text to text", "Convert both sides with str()")
        if key == reserved:
            raise bad("metadata", {key: text}, "uses a name kept for the file format", "Rename the entry")


def _check_tensor(what: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or t.dtype not in _DTYPES:
        given = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
        raise bad(what, given, "must be a float32 or float64 tensor", "Convert it with .float() or .double()")
    if not bool(torch.isfinite(t).all()):
        fix = "Lower the learning rate or raise the prior precision, and train again"
        raise bad(what, "a tensor", "has entries that are infinite or NaN", fix)


def _check_pair(name: str, mean: Tensor, variance: Tensor) -> None:
    _check_tensor(f"mean[{name!r}]", mean)
    _check_tensor(f"variance[{name!r}]", variance)
    if mean.shape != variance.shape:
        problem = f"must have the mean's shape {tuple(mean.shape)}"
        raise bad(f"variance[{name!r}].shape", tuple(variance.shape), problem, "Pass one variance per weight")
    if bool((variance < 0).any()):
        fix = "Pass variances, not log-variances"
        raise bad(f"variance[{name!r}]", float(variance.min()), "must be at least 0", fix)
