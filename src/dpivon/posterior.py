"""The trained object: a Gaussian mean-field posterior q(θ) = N(m, diag(v)) over a network's weights.

Everything here is post-processing of numbers that were already released, so it spends no privacy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpivon.errors import ArgumentError, bad
from dpivon.shards import local, whole
from dpivon.tensor_files import read_tensors, write_tensors

_FORMAT_KEY = "dpivon_posterior"
_FORMAT_VERSION = "1"
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


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
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
            _check_tensors(name, self.mean[name], self.variance[name])
        check_metadata(self.metadata, _FORMAT_KEY)
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
    def std(self) -> dict[str, Tensor]:
        """√v, by name."""
        return {name: v.sqrt() for name, v in self.variance.items()}

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

    def matches(self, model: nn.Module) -> bool:
        """True when names and shapes fit ``model``; otherwise an error naming the first that does not."""
        self.for_model(model)
        return True

    def for_model(self, model: nn.Module) -> Posterior:
        """This posterior under ``model``'s parameter names, or an error naming the first misfit.

        An optimizer that was given bare tensors knows no names and calls them "0", "1", …: those are
        matched in order to the model's trainable parameters.
        """
        names = model_names({name: m.shape for name, m in self.mean.items()}, model)
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
        write_tensors(path, tensors, {**self.metadata, _FORMAT_KEY: _FORMAT_VERSION})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Posterior:
        """Read what :meth:`save` wrote, onto the CPU. Only safetensors is read: nothing is unpickled."""
        fix = "Pass a file written by Posterior.save"
        tensors, metadata = read_tensors(path, key=_FORMAT_KEY, version=_FORMAT_VERSION, what="posterior", fix=fix)
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


def model_names(shapes: dict[str, torch.Size], model: nn.Module) -> dict[str, str]:
    """The model's name for each of a posterior's tensors, or an error naming the first misfit."""
    from dpivon.variational.convert import plain_parameters  # here: it makes posteriors itself

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


def check_metadata(metadata: dict[str, str], reserved: str) -> None:
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise bad("metadata", {key: text}, "must map text to text", "Convert both sides with str()")
        if key == reserved:
            raise bad("metadata", {key: text}, "uses a name kept for the file format", "Rename the entry")


def check_tensor(what: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or t.dtype not in _DTYPES:
        given = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
        raise bad(what, given, "must be a float32 or float64 tensor", "Convert it with .float() or .double()")
    if not bool(torch.isfinite(t).all()):
        fix = "Lower the learning rate or raise the prior precision, and train again"
        raise bad(what, "a tensor", "has entries that are infinite or NaN", fix)


def _check_tensors(name: str, mean: Tensor, variance: Tensor) -> None:
    check_tensor(f"mean[{name!r}]", mean)
    check_tensor(f"variance[{name!r}]", variance)
    if mean.shape != variance.shape:
        problem = f"must have the mean's shape {tuple(mean.shape)}"
        raise bad(f"variance[{name!r}].shape", tuple(variance.shape), problem, "Pass one variance per weight")
    if bool((variance < 0).any()):
        fix = "Pass variances, not log-variances"
        raise bad(f"variance[{name!r}]", float(variance.min()), "must be at least 0", fix)
