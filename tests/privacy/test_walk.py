"""The walk of one example, from the loader's draw to the ledger's line: which files of the library a reader has to open."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.durable.ledger import Ledger

ROOT = Path(dpivon.__file__).parent
MOST = 20


def walk(tmp_path, monkeypatch, make_optimizer):
    """Files entered during a step of the user's own loop until its release is in the ledger, in the order of first entry."""
    torch.manual_seed(0)
    tmp_path.mkdir(exist_ok=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
    engine = dpivon.PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=make_optimizer(model.parameters()),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    engine.check(nn.CrossEntropyLoss())
    batches = iter(loader)

    def step():
        x, y = next(batches)
        sampled = hasattr(optimizer.original_optimizer, "sampled_params")
        with optimizer.sampled_params(train=True) if sampled else contextlib.nullcontext():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()  # the model is tried on made-up inputs once
    found: list[str] = []
    ended = []
    charge = Ledger.charge
    monkeypatch.setattr(Ledger, "charge", lambda *given: (charge(*given), ended.append(True))[0])

    def entered(frame, event, arg):
        path = frame.f_code.co_filename
        if event == "call" and not ended and path.startswith(str(ROOT)):
            name = Path(path).relative_to(ROOT).as_posix()
            if name not in found:
                found.append(name)

    sys.setprofile(entered)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert ended
    return found


def test_an_example_passes_few_files_and_leaves_no_folder_twice(tmp_path, monkeypatch):
    found = walk(tmp_path, monkeypatch, lambda params: torch.optim.SGD(params, lr=0.1))
    assert len(found) <= MOST, found
    folders = [name.split("/")[0] for name in found]
    assert folders == sorted(folders, key=["privacy", "durable"].index)
    assert not any("ranks/" in name or "kernels/" in name for name in found), "a single process on a CPU needs neither"


def test_samples_of_theta_add_update_rules_only(tmp_path, monkeypatch):
    """θ is drawn from the posterior, and no example is in it."""
    plain = walk(tmp_path, monkeypatch, lambda params: torch.optim.SGD(params, lr=0.1))
    sampled = walk(tmp_path / "other", monkeypatch, lambda params: dpivon.IVON(params, lr=0.1, ess=200))
    assert {name.split("/")[0] for name in set(sampled) - set(plain)} <= {"optim", "shards.py"}
