"""Private training on several processes: ``torchrun --nproc-per-node 2 examples/ddp.py``.

scikit-learn's digits, IVON, a posterior at the end. ``--fsdp`` shards the model instead of copying it. With CUDA every rank
takes a GPU and speaks NCCL, otherwise gloo. Stop it as you like (also by killing a rank): the same command goes on, with
another number of processes too.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, test inputs, test labels: the same on every rank."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x, dtype=torch.float32) / 16.0, torch.tensor(y)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return TensorDataset(inputs[train], labels[train]), inputs[test], labels[test]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))


def join() -> torch.device:
    """This process in the group that torchrun describes in the environment, and the device that it computes on."""
    timeout = datetime.timedelta(minutes=5)  # after which the others give up on a rank that does not answer
    if "RANK" not in os.environ:  # without torchrun: a group of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


def shard(model: nn.Sequential, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(options: argparse.Namespace) -> dict[str, Any]:
    """All of one rank's run; what it reports."""
    device = join()
    torch.manual_seed(0)
    data, test_inputs, test_labels = digits()
    model: nn.Module = network().to(device)
    if options.fsdp:
        model = shard(model, device)  # type: ignore[arg-type]
    engine = dpivon.PrivacyEngine(accountant="pld")
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=dpivon.IVON(model.parameters(), lr=1.0, ess=len(data), hess_init=0.5),
        data_loader=DataLoader(data, batch_size=options.batch_size),  # b of all ranks together
        target_epsilon=options.epsilon,
        target_delta=1e-5,
        epochs=options.epochs,
        max_grad_norm=1.0,
    )
    engine.check(nn.functional.cross_entropy)
    run = dpivon.Checkpoints(options.out, engine=engine, optimizer=optimizer, data_loader=loader)
    begun = run.restore()
    with run.saving_on_signals():
        for epoch in range(begun.epoch, options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                with optimizer.sampled_params(train=True):
                    nn.functional.cross_entropy(private(x.to(device)), y.to(device)).backward()
                optimizer.step()
            run.save()
            if dist.get_rank() == 0 and options.verbose:
                print(f"epoch {epoch + 1}: ε = {engine.get_epsilon(1e-5):.3f}", flush=True)
    posterior = optimizer.posterior().to("cpu")  # every rank asks: of a sharded model each has a part
    probabilities = dpivon.predict(network(), posterior, test_inputs, samples=20).probs
    accuracy = float((probabilities.argmax(1) == test_labels).float().mean())
    return {
        "ranks": dist.get_world_size(),
        "sharded": options.fsdp,
        "resumed_at": begun.steps,
        "epsilon": engine.get_epsilon(1e-5),
        "accuracy": accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fsdp", action="store_true", help="shard parameters, sums, noise and posterior over the ranks"
    )
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=140, help="expected batch of all ranks together")
    parser.add_argument(
        "--out", type=Path, default=Path("ddp-output"), help="ledger and checkpoints; resumes from there"
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    try:
        report = train(options)
        if dist.get_rank() == 0:
            kind = "sharded over" if report["sharded"] else "on"
            print(
                f"{kind} {report['ranks']} ranks, begun at step {report['resumed_at']}: "
                f"ε = {report['epsilon']:.3f} at δ = 1e-5, accuracy {report['accuracy']:.3f}"
            )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
