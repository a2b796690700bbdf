"""One NCCL rank, data parallel and sharded, against the plain path on the same GPU. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if not torch.cuda.is_available() or not dist.is_nccl_available():
    pytest.skip("needs a CUDA device and NCCL: run `pytest tests/gpu` on a machine with both", allow_module_level=True)

import dpivon
from dpivon.optim.tensors import TensorList
from dpivon.shards import part_of

DEVICE = torch.device("cuda")


@pytest.fixture
def group() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Placed:
    """Noise by draw and place, the same whoever holds which part."""

    generator = None

    def __init__(self, optimizer: Any, seed: int) -> None:
        self.optimizer, self.seed, self.calls = optimizer, seed, 0

    def normal(self, like: Tensor, std: float) -> Tensor:
        p = self.optimizer.params[self.calls % len(self.optimizer.params)]
        generator = torch.Generator().manual_seed(self.seed + self.calls)
        self.calls += 1
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(like.device)
        return part_of(noise, p).to(like.dtype) * std


def trained(kind: str, method: str) -> tuple[dpivon.Posterior, float]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(4, (64,), generator=generator))
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to(DEVICE)
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net, device_ids=[0])
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net[0])
        fully_shard(net)
    inner: Any = (
        dpivon.IVON(net.parameters(), lr=0.2, ess=64, beta2=0.9)
        if method == "ivon"
        else torch.optim.Adam(net.parameters(), lr=0.01)
    )
    engine = dpivon.PrivacyEngine(distributed=kind != "plain", replica_check_every=1)
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=inner,
        data_loader=DataLoader(data, batch_size=16, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    optimizer.noise, theta = Placed(optimizer, 1000), Placed(optimizer, 2000)
    if method == "ivon":
        inner._standard_normals = lambda like: TensorList([theta.normal(t, 1.0) for t in like])  # by place, not at once
    for x, y in loader:
        optimizer.zero_grad()
        if method == "ivon":
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        else:
            nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
    return optimizer.posterior(), engine.get_epsilon(1e-5)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("method", ["ivon", "adam"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_rank_over_nccl_is_the_plain_path(kind: str, method: str) -> None:
    plain, epsilon = trained("plain", method)
    found, same_epsilon = trained(kind, method)
    assert same_epsilon == epsilon
    for name, mean in plain.mean.items():
        assert torch.allclose(found.mean[name], mean, atol=1e-5), name
        assert torch.allclose(found.variance[name], plain.variance[name], rtol=1e-4, atol=1e-9), name


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_on_a_gpu_goes_on_with_new_noise(kind: str, tmp_path: Any) -> None:
    def kept() -> tuple[dpivon.Resumed, int]:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)).to(DEVICE)
        if kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(net)
        engine = dpivon.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=net,
            optimizer=dpivon.IVON(net.parameters(), lr=0.2, ess=64),
            data_loader=DataLoader(TensorDataset(torch.ones(64, 16), torch.zeros(64).long()), batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
        )
        run = dpivon.Checkpoints(tmp_path, engine=engine, optimizer=optimizer, data_loader=loader)
        begun = run.restore()
        for x, y in loader:
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
        run.save()
        engine.ledger.close()  # type: ignore[union-attr]
        return begun, len(engine.accountant)

    assert kept()[1] == 4
    begun, charged = kept()
    assert (begun.steps, begun.lost, charged) == (4, 0, 8)
