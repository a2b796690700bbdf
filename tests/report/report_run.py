"""A RUN folder of a really trained small model on scikit-learn's digits, with every file of `dpivon train`'s contract."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.data import load_digits
from dpivon.durable.ledger import read
from dpivon.privacy.accounting.recorded import LEDGER, epsilons, history
from dpivon.privacy.export import export

EPSILON, DELTA, EPOCHS, BATCH, NORM, SEED = 6.0, 1e-4, 12, 128, 1.0, 918273645
SIGMA = 1.1455  # spends 5.99 of ε = 6; calibrating takes longer than training
CLASSES = [f"digit {i}" for i in range(10)]


def make_run(folder: Path) -> Path:
    """Train for a few seconds, and write down what `dpivon train` would."""
    began = time.perf_counter()
    torch.manual_seed(SEED)
    data = load_digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    engine = dpivon.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=dpivon.IVON(net.parameters(), lr=0.5, ess=len(data.train), hess_init=1.0),
        data_loader=DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=BATCH),
        noise_multiplier=SIGMA,
        max_grad_norm=NORM,
    )
    kept = dpivon.Checkpoints(folder, engine=engine, optimizer=optimizer, data_loader=loader)
    kept.restore()
    progress, step = [], 0
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
        with torch.no_grad():
            heldout = net(data.validation.x).log_softmax(1)
        progress.append(
            {
                "step": step,
                "steps": EPOCHS * len(loader),
                "epoch": epoch + 1,
                "epsilon": engine.get_epsilon(DELTA),
                "delta": DELTA,
                "seconds": time.perf_counter() - began,
                "heldout_nll": float(nn.functional.nll_loss(heldout, data.validation.y)),
                "heldout_accuracy": float((heldout.argmax(1) == data.validation.y).float().mean()),
            }
        )
    kept.save()
    engine.ledger.close()
    posterior = optimizer.original_optimizer.posterior(net)
    _write(folder, net, posterior, data, progress, optimizer.noise_multiplier, time.perf_counter() - began)
    return folder


def _write(folder, net, posterior, data, progress, sigma, seconds) -> None:
    export(folder, folder / "model", DELTA)
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in progress))
    options = {"method": "dp-ivon-gradsq", "batch_size": BATCH, "epochs": EPOCHS, "max_grad_norm": NORM, "seed": SEED}
    (folder / "config.yaml").write_text(yaml.safe_dump(options | {"lr": 0.5, "delta": DELTA, "epsilon": EPSILON}))
    generator = torch.Generator().manual_seed(7)
    averaged = dpivon.predict(net, posterior, data.test.x, 32, generator=generator)
    mean = dpivon.predict(net, posterior, data.test.x, 0)
    order = averaged.entropy.argsort(stable=True).numpy()
    shown = np.concatenate([order[:16], order[-16:]])
    pixels = (255 * (1 - data.test.x[shown])).round().to(torch.uint8).numpy().transpose(0, 2, 3, 1).repeat(3, axis=3)
    np.savez_compressed(
        folder / "test.npz",
        probabilities=averaged.probs.float().numpy(),
        mean_probabilities=mean.probs.float().numpy(),
        targets=data.test.y.numpy(),
        images=pixels,
        image_index=shown.astype(np.int64),
    )
    layers = []
    for name, variance in posterior.variance.items():
        low, median, high = np.quantile(variance.sqrt().numpy(), [0.05, 0.5, 0.95]).tolist()
        layers.append({"name": name, "numel": variance.numel(), "sd_q05": low, "sd_median": median, "sd_q95": high})
    (folder / "posterior.json").write_text(json.dumps({"layers": layers}))
    ledger = folder / LEDGER
    spent = epsilons(history(read(ledger), 0), DELTA)
    summary = {
        "format": 1,
        "about": {
            "title": "Handwritten digits",
            "date": "2026-11-17",
            "purpose": "An example of a report",
            "responsible": "the authors of dpivon",
            "dataset": "scikit-learn’s digits",
        },
        "method": "dp-ivon-gradsq",
        "epsilon": spent["rdp"],
        "delta": DELTA,
        "accountant": "rdp",
        "epsilon_by_accountant": spent,
        "adjacency": "add/remove",
        "dataset_size": len(data.train),
        "sampling_rate": BATCH / len(data.train),
        "expected_batch_size": BATCH,
        "steps": progress[-1]["step"],
        "noise_multiplier": sigma,
        "max_grad_norm": NORM,
        "seconds": seconds,
        "hardware": "CPU, 1 thread",
        "versions": {"dpivon": dpivon.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "task": {"kind": "image", "classes": CLASSES, "inputs": "scans of handwritten digits, 8×8 pixels"},
        "metrics": None,
        "public_inputs": [
            "The number of training examples and the expected batch size.",
            "The ten classes.",
            "Pixels run from 0 to 16.",
        ],
        "choices_not_made": [
            "Pixels were not scaled by statistics of the training data.",
            "No step was chosen by its held-out score.",
        ],
        "ledger_digest": hashlib.sha256(ledger.read_bytes()).hexdigest(),
        "heldout_is_private": False,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def copy_of(run: Path, to: Path, **changes: object) -> Path:
    """The same folder with other values in its summary."""
    shutil.copytree(run, to)
    summary = json.loads((to / "summary.json").read_text())
    (to / "summary.json").write_text(json.dumps(summary | changes))
    return to


def hostile_copy(run: Path, to: Path, names: list[str]) -> Path:
    """The same folder with these for its classes, its layers and whatever else is text."""
    layer = json.loads((run / "posterior.json").read_text())["layers"][0]
    copy_of(
        run, to, task={"kind": names[0], "classes": names, "inputs": names[0]}, hardware=names[1], public_inputs=names
    )
    (to / "posterior.json").write_text(json.dumps({"layers": [layer | {"name": name} for name in names]}))
    return to
