"""A private run whose draws are all seeded, and its eager loop: what compiled steps are held to, on a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpivon
from dpivon.methods import METHODS


def private_run(module: nn.Module, loader: Any, kind: str = "ivon", samples: int = 1, lr: float = 0.01, **options: Any):
    """Engine, model, optimizer and loader."""
    device = next(module.parameters()).device
    inner: Any = torch.optim.Adam(module.parameters(), lr=lr)
    name, _, curvature = kind.partition(":")
    n, drawn = len(loader.dataset), torch.Generator(device).manual_seed(2)
    if name == "ivon":
        given: Any = {"mc_samples": samples, "curvature": curvature or None}
        groups = [{"params": list(part.parameters())} for part in (module[:2], module[2:])] if curvature else None
        inner = dpivon.IVON(groups or module.parameters(), lr=0.1, ess=n, generator=drawn, **given)
    elif name in METHODS:
        inner = dpivon.method(name, module, dataset_size=n, generator=drawn).optimizer
    engine = dpivon.PrivacyEngine(generator=torch.Generator().manual_seed(3))
    options = {"noise_multiplier": 1.0, "max_grad_norm": 0.5} | options
    return engine, *engine.make_private(module=module, optimizer=inner, data_loader=loader, **options)


def by_hand(losses: Callable[..., Tensor], optimizer: Any, model: nn.Module, batch: Any, passes: int) -> None:
    """A step as a user writes it."""
    optimizer.zero_grad()
    for _ in range(passes):
        if isinstance(optimizer.original_optimizer, dpivon.IVON):
            with optimizer.sampled_params(train=True):
                losses(model, batch).mean().backward()
        else:
            losses(model, batch).mean().backward()
    optimizer.step()
