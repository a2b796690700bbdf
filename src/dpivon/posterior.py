"""The trained object: a Gaussian mean-field posterior q(θ) = N(m, diag(v)) over a network's weights.

Everything here is post-processing of numbers that were already released, so it spends no privacy.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from dpivon.errors import ArgumentError, bad

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
    """q(θ) = N(m, diag(v)): ``mean`` holds m and ``variance`` holds v, by the model's parameter names.

    Only what was trained is in it: buffers and frozen parameters come from the model at prediction
    time. The tensors are detached but not copied; v = 0 is a point estimate. ``metadata`` is free text
    that travels with a saved file.
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
        for key, text in self.metadata.items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise bad("metadata", {key: text}, "must map text to text", "Convert both sides with str()")
            if key == _FORMAT_KEY:
                raise bad("metadata", {key: text}, "uses a name kept for the file format", "Rename the entry")
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
            name: p.detach().clone().to(p.dtype if p.dtype in _DTYPES else torch.float32) for name, p in chosen.items()
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
        params = dict(unwrap(model).named_parameters())
        if all(name.isdecimal() for name in self.mean) and not self.mean.keys() <= params.keys():
            return self._by_position({name: p for name, p in params.items() if p.requires_grad})
        fix = "Pass the model this posterior was trained on"
        for name, m in self.mean.items():
            if name not in params:
                raise bad("posterior", name, "is no parameter of the model", fix)
            if m.shape != params[name].shape:
                problem = f"has shape {tuple(m.shape)} but the model's has {tuple(params[name].shape)}"
                raise bad("posterior", name, problem, fix)
        for name, p in params.items():
            if p.requires_grad and name not in self.mean:
                fix_or_freeze = f"{fix}, or freeze that parameter with requires_grad_(False)"
                raise bad("model", name, "is trainable but not in the posterior", fix_or_freeze)
        return self

    def _by_position(self, trainable: dict[str, Tensor]) -> Posterior:
        fix = "Call optimizer.posterior(model) to get one with the model's names"
        positions = sorted(self.mean, key=int)
        if positions != [str(i) for i in range(len(trainable))]:
            problem = f"does not number the model's {len(trainable)} trainable parameters one by one"
            raise bad("posterior", positions, problem, fix)
        names = dict(zip(positions, trainable, strict=True))
        for position, name in names.items():
            m, p = self.mean[position], trainable[name]
            if m.shape != p.shape:
                problem = f"has shape {tuple(m.shape)} but the model's {name!r} has {tuple(p.shape)}"
                raise bad("posterior", position, problem, fix)
        return Posterior(
            {name: self.mean[position] for position, name in names.items()},
            {name: self.variance[position] for position, name in names.items()},
            self.metadata,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; a crash half-way leaves whatever was at ``path`` before."""
        from safetensors.torch import save_file

        target = Path(path)
        if not target.parent.is_dir():
            raise bad("path", str(target), "is in a folder that does not exist", "Create the folder first")
        if target.is_dir():
            raise bad("path", str(target), "is a folder", "Pass the name of a file")
        # Cloned: safetensors refuses tensors that share memory, such as views of one flat vector.
        tensors = {
            f"{part}.{name}": t.cpu().clone(memory_format=torch.contiguous_format)
            for part, named in (("mean", self.mean), ("variance", self.variance))
            for name, t in named.items()
        }
        # Not tempfile: its files are private to the user, and os.replace would keep them so.
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            save_file(tensors, temporary, {**self.metadata, _FORMAT_KEY: _FORMAT_VERSION})
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Posterior:
        """Read what :meth:`save` wrote, onto the CPU. Only safetensors is read: nothing is unpickled."""
        from safetensors import SafetensorError, safe_open

        source = Path(path)
        fix = "Pass a file written by Posterior.save"
        if not source.is_file():
            raise bad("path", str(source), "is not an existing file", fix)
        named: dict[str, dict[str, Tensor]] = {"mean": {}, "variance": {}}
        try:
            with safe_open(source, framework="pt", device="cpu") as file:
                metadata = dict(file.metadata() or {})
                version = metadata.pop(_FORMAT_KEY, None)
                if version is None:
                    raise bad("path", str(source), "is a safetensors file but holds no posterior", fix)
                if version != _FORMAT_VERSION:
                    problem = f"has format {version}, and this dpivon reads format {_FORMAT_VERSION}"
                    raise bad("path", str(source), problem, "Use the dpivon version that wrote the file")
                for key in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                    part, _, name = key.partition(".")
                    if part not in named or not name:
                        raise bad("path", str(source), f"holds {key!r}, which is no posterior tensor", fix)
                    # Cloned: the tensor may still be a view of the file, which others can overwrite.
                    named[part][name] = file.get_tensor(key).clone()
        except (SafetensorError, OSError, EOFError) as error:
            problem = f"cannot be read as a safetensors file ({error})"
            raise bad("path", str(source), problem, f"{fix}; pickled checkpoints are never opened") from None
        try:
            return cls(named["mean"], named["variance"], metadata)
        except ArgumentError as error:
            raise bad("path", str(source), f"holds no valid posterior ({error})", fix) from None


def _check_tensors(name: str, mean: Tensor, variance: Tensor) -> None:
    for part, t in (("mean", mean), ("variance", variance)):
        if not isinstance(t, Tensor) or t.dtype not in _DTYPES:
            what = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
            fix = "Convert it with .float() or .double()"
            raise bad(f"{part}[{name!r}]", what, "must be a float32 or float64 tensor", fix)
        if not bool(torch.isfinite(t).all()):
            fix = "Lower the learning rate or raise the prior precision, and train again"
            raise bad(f"{part}[{name!r}]", "a tensor", "has entries that are infinite or NaN", fix)
    if mean.shape != variance.shape:
        problem = f"must have the mean's shape {tuple(mean.shape)}"
        raise bad(f"variance[{name!r}].shape", tuple(variance.shape), problem, "Pass one variance per weight")
    if bool((variance < 0).any()):
        fix = "Pass variances, not log-variances"
        raise bad(f"variance[{name!r}]", float(variance.min()), "must be at least 0", fix)
