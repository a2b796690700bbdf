"""Real runs for real processes: they train, save, tell what they released, and can be killed at any moment."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import BatchMemoryManager, Checkpoints, PrivacyEngine
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from dpivon.train.kept import KeptRun

EXAMPLES, BATCH, EPOCHS = 64, 8, 5
STEPS = EPOCHS * EXAMPLES // BATCH


def train(
    folder: Path, witness: Path, *, save_every: int = 3, width: int = 8, micro: int = 5, hold: bool = False
) -> str:
    """From wherever the folder's run was to its end; a digest of the final model and posterior.

    ``witness`` gets a line after every release, as somebody would who sees them all.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same in every process: what must not repeat must not repeat in spite of it
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(EXAMPLES, 5, generator=generator), torch.randint(3, (EXAMPLES,), generator=generator)
    net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))
    engine = PrivacyEngine(generator=torch.default_generator)
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=dpivon.IVON(net.parameters(), lr=0.3, ess=EXAMPLES),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    engine.check(nn.functional.cross_entropy)
    run = Checkpoints(folder, engine=engine, optimizer=optimizer, data_loader=loader)
    seen = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    optimizer.attach_step_hook(lambda o: os.write(seen, f"{_digest(o.last_release.gradients.values())}\n".encode()))
    calls = 0
    with run.saving_on_signals():
        for _ in range(run.restore().epoch, EPOCHS):
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=micro, optimizer=optimizer
            ) as micro_batches:
                for batch, labels in micro_batches:
                    optimizer.zero_grad()
                    with optimizer.sampled_params(train=True):
                        nn.functional.cross_entropy(model(batch), labels).backward()
                    optimizer.step()
                    calls += 1
                    if hold and calls == 2 * EXAMPLES // BATCH:
                        print("holding", flush=True)
                        sys.stdin.readline()
                    if calls % save_every == 0:
                        run.save()
    run.save()
    states = [optimizer.state[p][name] for p in optimizer.params for name in ("momentum", "hess")]
    return _digest([*(p.detach() for p in net.parameters()), *states])


def train_fit(folder: Path, witness: Path, *, save_every: int = 3) -> str:
    """The same by ``dpivon.fit(out=…)``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(EXAMPLES, 5, generator=generator), torch.randint(3, (EXAMPLES,), generator=generator)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    seen = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    step = KeptRun._step

    def shown(run: KeptRun, batch: Any) -> bool:
        went_on = step(run, batch)
        os.write(seen, f"{_digest(run.optimizer.last_release.gradients.values())}\n".encode())
        if run.done % save_every == 0:
            run.kept.save()
        return went_on

    KeptRun._step = shown
    plan = {
        "method": "dp-ivon-gradsq",
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "lr": 0.3,
        "accountant": "rdp",
    }
    posterior = dpivon.fit(net, x, y, **plan, seed=7, out=folder).posterior
    return _digest([t[name] for t in (posterior.mean, posterior.std) for name in sorted(t)])


def train_stack(folder: Path, witness: Path, *, save_every: int = 8) -> str:
    """The same of three runs at once, in blocks of four steps."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(EXAMPLES, 5, generator=generator), torch.randint(3, (EXAMPLES,), generator=generator)
    runs = [
        Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, BATCH),
        Run("dp-sgd", 12, 0.5, 1.0, 0.1, BATCH),
        Run("dp-adam", 13, 2.0, 0.5, 0.01, BATCH),
    ]
    stack = Stack(runs, AnyNetwork(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))), x, y, block=4)
    seen = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    apply = stack._apply

    def shown(g, *rest):
        os.write(seen, f"{_digest([g])}\n".encode())
        return apply(g, *rest)

    stack._apply = shown
    kept = StackCheckpoints(stack, folder)
    kept.restore()
    for done in stack.train(STEPS - stack.steps_done):
        if done % save_every == 0:
            kept.save({})
    kept.save({})
    kept.settle()
    return _digest([value for part in stack.parts for _, value in sorted(part.state.items())])


def _digest(tensors) -> str:
    total = hashlib.sha256()
    for value in tensors:
        total.update(value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:24]


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(train(Path(sys.argv[1]), Path(sys.argv[2]), hold="--hold" in sys.argv), flush=True)
