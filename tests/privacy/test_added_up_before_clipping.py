"""All that is added up before clipping, at once: tied weights, views, θ-samples, micro-batches, non-finite examples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import PrivacyEngine

N, B, C, SIGMA = 40, 8, 0.5, 0.7


class Tied(nn.Module):
    """The embedding is the last layer too, and the middle layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(7, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :6].mul(2).long().clamp(0, 6)
        h = self.middle(torch.tanh(self.middle(self.embedding(tokens)))).mean(1)
        out: Tensor = self.head(h * x[:, 6:].mean(1, keepdim=True))
        return out


def clipped_sum(model: nn.Module, thetas: list[list[Tensor]], x: Tensor, y: Tensor, views: int) -> list[Tensor]:
    """Of the mean over θ-samples and views of each example; one that is not finite is left out."""
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for i in range(0, len(x), views):
        mean = [torch.zeros_like(p) for p in params]
        for theta in thetas:
            with torch.no_grad():
                for p, value in zip(params, theta, strict=True):
                    p.copy_(value)
            loss = nn.functional.cross_entropy(model(x[i : i + views]), y[i : i + views])
            found = torch.autograd.grad(loss, params)
            mean = [m + g / len(thetas) for m, g in zip(mean, found, strict=True)]
        norm = math.sqrt(sum(float(s.square().sum()) for s in mean))
        if math.isfinite(norm):
            total = [t + s * min(1.0, C / (norm + 1e-6)) for t, s in zip(total, mean, strict=True)]
    return total


@pytest.mark.parametrize(("views", "samples"), [(2, 1), (1, 3), (2, 2)])
def test_everything_is_added_up_then_clipped_once(views: int, samples: int) -> None:
    """In micro-batches, one of which has an example that is not finite; and the stated variance is that of each release."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(7, (N,), generator=generator)
    x[2] = math.nan
    torch.manual_seed(0)
    model, twin = Tied().double(), Tied().double()
    engine = PrivacyEngine(generator=torch.Generator().manual_seed(1))
    wrapped, optimizer, loader = engine.make_private(
        module=model,
        optimizer=dpivon.IVON(model.parameters(), lr=0.1, ess=N, mc_samples=samples),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=B),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        augmentations=views,
    )
    noise: list[Tensor] = []
    own = optimizer.noise.normal
    optimizer.noise.normal = lambda like, std: (noise.append(own(like, std)), noise[-1])[1]
    for step in range(3):
        optimizer.noise_multiplier = SIGMA * (1 + step)  # a schedule
        next(iter(loader))
        noise.clear()
        expected = [torch.zeros_like(p) for p in optimizer.params]
        parts = [torch.arange(B * step, B * step + B // 2), torch.arange(B * step + B // 2, B * step + B)]
        for k, part in enumerate(parts):
            optimizer.begin_micro_batch(first=k == 0, last=k == 1)
            optimizer.zero_grad()
            thetas = []
            for _ in range(samples):
                with optimizer.sampled_params(train=True):
                    thetas.append([p.detach().clone() for p in optimizer.params])
                    nn.functional.cross_entropy(wrapped(x[part]), y[part]).backward()
            optimizer.step()
            more = clipped_sum(twin, thetas, x[part], y[part], views)
            expected = [a + b for a, b in zip(expected, more, strict=True)]
        release, b = optimizer.last_release, optimizer.expected_batch_size
        for p, s, z in zip(optimizer.params, expected, noise, strict=True):
            torch.testing.assert_close(release.gradients[p], (s + z) / b, rtol=1e-9, atol=1e-11)
        assert release.variance == pytest.approx((SIGMA * (1 + step) * C / b) ** 2)
    assert len(engine.accountant) == 3
