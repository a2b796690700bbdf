"""A private optimizer under Opacus's names: what schedulers, memory managers and people read off it, and what it refuses.

Nothing here sees a gradient. What is done with them is in :mod:`dpivon.privacy.optimizer`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import DPOptimizer as OpacusDPOptimizer
from torch.optim import Optimizer

from dpivon.errors import PrivacyError
from dpivon.privacy.clipping import Clipping
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.noise import NoiseSource, SecureNoise


class OpacusNames(OpacusDPOptimizer):  # type: ignore[misc]
    """What :class:`~dpivon.DPOptimizer` is made on: an optimizer around another, with one spec of its next release.

    Parameters, groups, state and defaults are the inner optimizer's, as in Opacus.
    """

    _step_supports_amp_scaling = True  # so that GradScaler announces itself, and can be refused

    def __init__(self, optimizer: Optimizer, *, spec: NoiseSpec, clipping: Clipping, noise: NoiseSource) -> None:
        self.original_optimizer = optimizer
        self._init_optimizer_protocol()
        self._spec, self._clipping = spec, clipping
        self.noise = noise
        self.secure_mode = isinstance(noise, SecureNoise)
        self.step_hooks: list[Callable[[Any], None]] = []

    def _init_optimizer_protocol(self) -> None:
        """What ``torch.optim.Optimizer.__init__`` sets up besides state and groups, which belong to the inner optimizer."""
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._patch_step_function()

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
