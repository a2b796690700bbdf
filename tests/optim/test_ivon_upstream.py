"""Step by step the same numbers as the authors' own ``ivon.IVON``, given the same noise."""

from __future__ import annotations

import copy
from typing import Any

import ivon
import ivon._ivon
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpivon import IVON

STEPS = 30
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Stream:
    """Standard normals one after the other: one call for ten numbers gives what ten calls for one give."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(numel)).to(dtype)


class TorchWithStream:
    """The torch that upstream sees: ``randn`` comes from a stream, everything else is torch."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, numel: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.stream(numel, dtype).to(device)


class StreamedIVON(IVON):
    stream: Stream

    def _standard_normal(self, like: Tensor) -> Tensor:
        return self.stream(like.numel(), like.dtype).reshape(like.shape)


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(dtype)


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "lr": 0.02},
        {"params": list(model[2].parameters()), "lr": 0.1, "beta1": 0.8, "ess": 70.0},
    ]


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(STEPS, 8, 5, generator=generator, dtype=torch.float64).to(dtype)
    ys = torch.randint(3, (STEPS, 8), generator=generator)
    return list(zip(xs, ys, strict=True))


def one_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, samples: int, style: str) -> None:
    if style == "ours":
        optimizer.zero_grad()
    for _ in range(samples):
        if style == "zero between":
            optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            if style == "upstream":
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture
def upstream_stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream(7)
    monkeypatch.setattr(ivon._ivon, "torch", TorchWithStream(stream))
    return stream


OPTIONS: list[dict[str, Any]] = [
    {},
    {"rescale_lr": False},
    {"debias": False},
    {"rescale_lr": False, "debias": False},
    {"clip_radius": 0.02},
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "hess_init": 0.25},
]


@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("samples", "style"), [(1, "upstream"), (1, "ours"), (3, "upstream"), (3, "ours"), (3, "zero between")]
)
@pytest.mark.parametrize("estimator", ["price", "gradsq"])
def test_every_step_equals_upstream(
    upstream_stream: Stream, estimator: str, samples: int, style: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    common = {"ess": 100.0, "beta2": 0.99, "weight_decay": 1e-3, "mc_samples": samples, "hess_approx": estimator}
    our_model, their_model = make_model(dtype), make_model(dtype)
    ours = StreamedIVON(groups(our_model), lr=0.1, **{**common, **options})
    ours.stream = Stream(7)
    theirs = ivon.IVON(groups(their_model), lr=0.1, **{**common, **options})
    tolerance = TOLERANCE[dtype]
    for x, y in batches(dtype):
        one_step(our_model, ours, x, y, samples, style)
        one_step(their_model, theirs, x, y, samples, "upstream")
        assert error(flat(list(our_model.parameters())), flat(list(their_model.parameters()))) <= tolerance
        for group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True):
            for key in ("momentum", "hess"):
                mine = flat([ours.state[p][key] for p in group["params"]])
                assert error(mine, their_group[key]) <= tolerance, key


def test_the_comparison_notices_other_noise(upstream_stream: Stream) -> None:
    our_model, their_model = make_model(torch.float64), make_model(torch.float64)
    ours = StreamedIVON(our_model.parameters(), lr=0.1, ess=100.0)
    ours.stream = Stream(8)
    theirs = ivon.IVON(their_model.parameters(), lr=0.1, ess=100.0)
    x, y = batches(torch.float64)[0]
    one_step(our_model, ours, x, y, 1, "ours")
    one_step(their_model, theirs, x, y, 1, "upstream")
    assert error(flat(list(our_model.parameters())), flat(list(their_model.parameters()))) > 1e-5


def test_clip_radius_bounds_the_step_and_is_reached() -> None:
    model = make_model(torch.float64)
    before = copy.deepcopy(list(model.parameters()))
    radius, lr, hess_init, weight_decay = 0.02, 0.1, 0.5, 1e-3
    optimizer = IVON(
        model.parameters(), lr=lr, ess=100, clip_radius=radius, hess_init=hess_init, weight_decay=weight_decay
    )
    x, y = batches(torch.float64)[0]
    one_step(model, optimizer, x, y, 1, "ours")
    moved = flat(list(model.parameters())).sub(flat(before)).abs()
    bound = lr * (hess_init + weight_decay) * radius
    assert moved.max() <= bound * (1 + 1e-9)
    at_bound = moved >= bound * (1 - 1e-9)
    assert at_bound.any()
    assert not at_bound.all()
