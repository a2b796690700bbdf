"""One small private run, made the same way on any number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.optim.point import Adam
from dpivon.shards import part_of

N, B = 60, 12


def dataset(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(N, 5, generator=generator), torch.randint(3, (N,), generator=generator))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))


class PlacedNoise:
    """Noise that depends on the draw and on the place in the whole parameter, so that a shard gets its part of it."""

    generator = None

    def __init__(self, optimizer: Any, seed: int) -> None:
        self.optimizer, self.seed, self.calls = optimizer, seed, 0

    def normal(self, like: Tensor, std: float) -> Tensor:
        params = self.optimizer.params
        p = params[self.calls % len(params)]
        generator = torch.Generator().manual_seed(self.seed + self.calls)
        self.calls += 1
        return part_of(torch.randn(p.shape, generator=generator, dtype=torch.float64), p) * std


def place_noise(optimizer: Any) -> None:
    """The same privacy noise and the same θ, whoever holds which part of the parameters."""
    optimizer.noise = PlacedNoise(optimizer, 1000)
    theta = PlacedNoise(optimizer, 2000)
    optimizer.original_optimizer._standard_normal = lambda like: theta.normal(like, 1.0).to(like.dtype)


def start(
    *,
    method: str = "ivon",
    wrap: Any = None,
    sigma: float = 1.0,
    batch: float | None = B,
    engine: Any = None,
    data: Any = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """(engine, model, optimizer, loader) with every stream from a fixed seed."""
    net = network()
    if wrap is not None:
        net = wrap(net)
    if method == "ivon":
        inner: Any = dpivon.IVON(net.parameters(), lr=0.2, ess=N, beta2=0.9, generator=torch.Generator().manual_seed(5))
    elif method == "prior":  # another mean and width in every coordinate, so that a wrong part of them shows
        whole = {n: torch.linspace(-1.0, 1.0, p.numel()).view(p.shape) for n, p in network().named_parameters()}
        prior = dpivon.Posterior(whole, {n: 0.001 + v.square() for n, v in whole.items()})
        facts: dict[str, Any] = {"lr": 0.2, "ess": N, "beta2": 0.9, "prior": prior}
        inner = dpivon.IVON(net.named_parameters(), **facts, generator=torch.Generator().manual_seed(5))
    elif method == "rule":
        inner = dpivon.RuleOptimizer(net.parameters(), Adam(), lr=0.05)
    else:
        inner = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    engine = engine or dpivon.PrivacyEngine(replica_check_every=1)
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=inner,
        data_loader=data or DataLoader(dataset(), batch_size=6, generator=torch.Generator().manual_seed(6)),
        noise_multiplier=sigma,
        max_grad_norm=0.8,
        noise_generator=None if engine.secure_mode else torch.Generator().manual_seed(7),
        expected_batch_size=batch,
        **options,
    )
    engine.check(nn.functional.cross_entropy)
    return engine, model, optimizer, loader


def one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    sampled = isinstance(optimizer.original_optimizer, dpivon.IVON)
    with optimizer.sampled_params(train=True) if sampled else nullcontext():
        nn.functional.cross_entropy(model(x), y).backward()  # of an empty part too
    optimizer.step()


def train(model: Any, optimizer: Any, loader: Any, steps: int, physical: int | None = None) -> list[int]:
    """The sizes of the (micro-)batches that this rank saw."""
    seen: list[int] = []
    done = [0]
    optimizer.attach_step_hook(lambda _: done.__setitem__(0, done[0] + 1))
    while done[0] < steps:
        manager = (
            nullcontext(loader)
            if physical is None
            else dpivon.BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
        )
        with manager as batches:
            for x, y in batches:
                seen.append(len(x))
                one_step(model, optimizer, x, y)
                if done[0] == steps:
                    break
    return seen


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference between two posteriors."""
    return max(float((a[what][k] - b[what][k]).abs().max()) for what in ("mean", "variance") for k in b["mean"])


def learned(engine: Any, optimizer: Any) -> dict[str, Any]:
    q = optimizer.posterior()
    return {
        "mean": {k: v.clone() for k, v in q.mean.items()},
        "variance": {k: v.clone() for k, v in q.variance.items()},
        "epsilon": engine.get_epsilon(1e-5),
        "history": engine.accountant.history,
    }


def shard(net: nn.Module) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net
