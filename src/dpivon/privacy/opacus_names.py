"""What people, schedulers and memory managers know from Opacus: names of its optimizer, and verbs of its engine.

Nothing here sees a gradient. What is done with them is in :mod:`dpivon.privacy.optimizer`.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import torch
from opacus.optimizers import DPOptimizer as OpacusDPOptimizer
from opacus.validators.module_validator import ModuleValidator
from torch import nn
from torch.optim import Optimizer

from dpivon.durable.ledger import Ledger
from dpivon.errors import PrivacyError, bad
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.clipping import Clipping
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.noise import NoiseSource, SecureNoise
from dpivon.privacy.ranks.states import FollowedLedger

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


class OpacusNames(OpacusDPOptimizer):  # type: ignore[misc]
    """What :class:`~dpivon.DPOptimizer` is made on: an optimizer around another, with one spec of its next release.

    Parameters, groups, state and defaults are the inner optimizer's, as in Opacus.
    """

    _step_supports_amp_scaling = True  # so that GradScaler announces itself, and can be refused

    def __init__(self, optimizer: Optimizer, *, spec: NoiseSpec, clipping: Clipping, noise: NoiseSource) -> None:
        self.original_optimizer = optimizer
        # What torch.optim.Optimizer sets up besides state and groups, which belong to the inner optimizer.
        for event in ("step", "state_dict", "load_state_dict"):
            for when in ("pre", "post"):
                setattr(self, f"_optimizer_{event}_{when}_hooks", OrderedDict())
        self._patch_step_function()
        self._spec, self._clipping = spec, clipping
        self.noise = noise
        self.secure_mode = isinstance(noise, SecureNoise)
        self.step_hooks: list[Callable[[Any], None]] = []

    # ---- the spec

    @property
    def spec(self) -> NoiseSpec:
        """What the next release will be. Immutable; the setters below replace it."""
        return self._spec

    @property
    def noise_multiplier(self) -> float:
        """σ of the next release; setting it replaces the spec."""
        return self._spec.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._spec = self._spec.replace(noise_multiplier=value)

    @property
    def max_grad_norm(self) -> float:
        """C of the next release; setting it replaces the spec, and the clipping with it."""
        return self._spec.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._spec = self._spec.replace(max_grad_norm=value)
        self._clipping = self._clipping.rescaled(self._spec.max_grad_norm)

    @property
    def clipping(self) -> Clipping:
        """How examples are bounded."""
        return self._clipping

    @property
    def expected_batch_size(self) -> float:
        """b, what a mean is divided by."""
        return self._spec.expected_batch_size

    @property
    def loss_reduction(self) -> str:
        """``"mean"`` or ``"sum"``."""
        return self._spec.loss_reduction

    @property
    def generator(self) -> torch.Generator | None:
        """Where the noise comes from; None in secure mode. Its state is a secret."""
        generator: torch.Generator | None = getattr(self.noise, "generator", None)
        return generator

    # ---- hooks

    @property
    def step_hook(self) -> Callable[[Any], None] | None:
        """The hook attached last, as Opacus has it."""
        return self.step_hooks[-1] if self.step_hooks else None

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Call ``fn(optimizer)`` after every release. Hooks add up; accounting is not among them and cannot be displaced."""
        self.step_hooks.append(fn)

    # ---- what is refused

    def add_noise(self) -> None:
        raise PrivacyError("add_noise() by itself would release without a charge. Call step().")

    def scale_grad(self) -> None:
        raise PrivacyError("scale_grad() by itself would change a release after its noise. Call step().")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise PrivacyError(
            "add_param_group on a private optimizer: its clipping bound and noise cover the parameters it was made with. "
            "Add the group before make_private."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivacyError(
            "pickle of a private optimizer: two processes would add the same noise and charge apart. "
            "Save optimizer.state_dict() instead."
        )


class OpacusVerbs:
    """Part of :class:`~dpivon.PrivacyEngine`."""

    accountant: Accountant
    ledger: Ledger | FollowedLedger | None

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the module with unsupported layers replaced (BatchNorm by GroupNorm, …)."""
        fixed: nn.Module = ModuleValidator.fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed

    def is_compatible(self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: Any = None) -> bool:
        return bool(ModuleValidator.is_valid(module))

    def validate(self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: Any = None) -> None:
        ModuleValidator.validate(module, strict=True)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Model, optimizer, schedulers and account in one file, as Opacus writes it."""
        parts = _parts(optimizer, noise_scheduler, grad_clip_scheduler)
        checkpoint = dict(checkpoint_dict or {})
        checkpoint["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
        checkpoint["privacy_accountant_state_dict"] = self.accountant.state_dict()
        checkpoint |= {f"{name}_state_dict": part.state_dict() for name, part in parts.items() if part is not None}
        torch.save(checkpoint, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` wrote. Tensors and plain values only: nothing in the file is executed."""
        parts = _parts(optimizer, noise_scheduler, grad_clip_scheduler)
        checkpoint = _read(path, torch_load_kwargs or {})
        saved = checkpoint["privacy_accountant_state_dict"]
        loaded = Accountant(self.accountant.mechanism())
        loaded.load_state_dict(saved)  # all is checked before anything changes
        self._check_contained(path, loaded)
        _load(module, checkpoint["module_state_dict"], module_load_dict_kwargs or {})
        if self.ledger is None:  # which otherwise knows of every release, also of those after the checkpoint
            self.accountant.load_state_dict(saved)
        for name, part in parts.items():
            state = checkpoint.pop(f"{name}_state_dict", None)
            if part is not None and state:
                part.load_state_dict(state)
            elif name == "optimizer" and (part is None) != (state is None):
                warnings.warn(
                    f"optimizer={part!r}: the checkpoint {'has' if state else 'lacks'} an optimizer state. "
                    "Pass the optimizer that was saved, or none.",
                    stacklevel=2,
                )
        return checkpoint

    def _check_contained(self, path: Any, loaded: Accountant) -> None:
        """ε never falls: the account that stays holds every release of the other one, kind by kind."""
        if self.ledger is not None and loaded.excess(self.accountant):
            raise PrivacyError(
                f"path={str(path)!r}: holds releases that the ledger of this engine does not. Attach the ledger of the run "
                "that wrote it."
            )
        if self.ledger is None and (held := self.accountant.excess(loaded)):
            raise PrivacyError(
                f"path={str(path)!r}: holds fewer releases than the {held} that this engine has charged, which cannot be taken "
                "back. Load it before training, into a new PrivacyEngine."
            )


def _read(path: str | os.PathLike[str] | IO[bytes], options: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint as plain values, with the entries it must have."""
    fix = "Give a file that save_checkpoint wrote; pickled objects are never loaded"
    try:
        checkpoint = torch.load(path, **{**options, "weights_only": True})
    except Exception as error:  # zip, pickle and torch each fail in their own ways
        raise bad("path", str(path), f"cannot be read as a checkpoint ({type(error).__name__}: {error})", fix) from None
    for key, within in (("module_state_dict", ()), ("privacy_accountant_state_dict", ("history",))):
        entry = checkpoint.get(key) if isinstance(checkpoint, dict) else None
        if not isinstance(entry, dict) or any(k not in entry for k in within):
            raise bad("path", str(path), f"holds no {key}", fix)
    return checkpoint


def _load(module: nn.Module, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The state into the module, whole or not at all."""
    before = copy.deepcopy(module.state_dict())
    try:
        module.load_state_dict(state, **options)
    except Exception as error:  # torch loads what fits before it says what does not
        module.load_state_dict(before)
        fix = "Make the model as it was when the checkpoint was written"
        raise bad("module", type(module).__name__, f"is not the model of the checkpoint ({error})", fix) from None


def _parts(optimizer: Any, noise_scheduler: Any, grad_clip_scheduler: Any) -> dict[str, Any]:
    """What a checkpoint holds besides model and account, under Opacus's names."""
    return {"optimizer": optimizer, "noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
