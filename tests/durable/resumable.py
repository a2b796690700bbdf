"""A short private run that can be stopped anywhere and gone on with, in this process or in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import BatchMemoryManager, Checkpoints, PrivacyEngine

EXAMPLES, EPOCHS, STEPS = 40, 2, 10  # 5 steps a pass
DELTA = 1e-3


class Stop(Exception):
    pass


class Run:
    """Model, optimizer and loader as a program makes them when it starts, all from the same seed."""

    def __init__(self, folder: Path, method: str = "ivon", *, micro: int | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(EXAMPLES, 5, generator=generator)
        y = torch.randint(3, (EXAMPLES,), generator=generator)
        if (change := options.pop("change_data", None)) is not None:
            x[change] += 1
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
        self.draws = options.pop("mc_samples", 1)
        inner: Any = torch.optim.Adam(self.net.parameters(), lr=0.05)
        if method == "ivon":
            own = {"mc_samples": self.draws, "curvature": options.pop("curvature", None)}
            inner = dpivon.IVON(self.net.parameters(), lr=0.3, ess=EXAMPLES, **own)
        elif method == "rule":
            rule = options.pop("rule")
            own = {"ess": EXAMPLES} if "ess" in rule.defaults else {}
            inner = dpivon.RuleOptimizer(self.net.parameters(), rule, lr=0.05, **own)
        self.engine = PrivacyEngine(secure_mode=options.pop("secure_mode", False))
        self.views = options.pop("augmentations", 1)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.net,
            optimizer=inner,
            data_loader=DataLoader(
                TensorDataset(x, y),
                batch_size=8,
                num_workers=options.pop("workers", 0),
                generator=torch.Generator().manual_seed(3) if options.pop("own_generator", False) else None,
            ),
            noise_multiplier=options.pop("sigma", 1.0),
            max_grad_norm=options.pop("max_grad_norm", 1.0),
            clipping=options.pop("clipping", "flat"),
            augmentations=self.views,
            grad_sample_mode=options.pop("grad_sample_mode", None),
        )
        self.micro, self.ivon = micro, method == "ivon"
        self.kept = Checkpoints(
            folder, engine=self.engine, optimizer=self.optimizer, data_loader=self.loader, **options
        )
        self.released: list[Tensor] = []
        self.optimizer.attach_step_hook(lambda o: self.released.append(_flat(o.last_release.gradients.values())))

    def step(self, x: Tensor, y: Tensor) -> None:
        x, y = (t.repeat_interleave(self.views, 0) for t in (x, y))
        self.optimizer.zero_grad()
        if self.ivon:
            for _ in range(self.draws):
                with self.optimizer.sampled_params(train=True):
                    nn.functional.cross_entropy(self.model(x), y).backward()
        else:
            nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def train(self, stop_at: int | None = None, save_every: int | None = None, resume: bool = True) -> Run:
        """To the end, or until ``stop_at`` calls of ``step()`` were made."""
        calls = 0
        resumed = self.kept.restore() if resume else None
        for _ in range(resumed.epoch if resumed else 0, EPOCHS):
            with _batches(self) as batches:
                for x, y in batches:
                    self.step(x, y)
                    calls += 1
                    if save_every and calls % save_every == 0:
                        self.kept.save()
                    if calls == stop_at:
                        return self
        return self

    def close(self) -> None:
        """As the end of a process does."""
        self.engine.ledger.close()

    @property
    def weights(self) -> Tensor:
        return _flat(p.detach() for p in self.net.parameters())

    @property
    def epsilon(self) -> float:
        return self.engine.get_epsilon(DELTA)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


class _batches:
    def __init__(self, run: Run) -> None:
        self.manager = (
            BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=run.micro, optimizer=run.optimizer)
            if run.micro
            else None
        )
        self.loader = run.loader

    def __enter__(self) -> Any:
        return self.manager.__enter__() if self.manager else self.loader

    def __exit__(self, *error: Any) -> None:
        if self.manager:
            self.manager.__exit__(*error)
