"""Runs of a plan one by one in the ordinary loop on Opacus's hooks, in fp32: what the stacks are held to.

Same network, data, σ, C, b, steps and hyperparameters; other batches and noise, so the two agree up to their seeds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon.errors import bad
from dpivon.methods import METHODS
from dpivon.methods import method as make
from dpivon.posterior import Posterior
from dpivon.privacy import PrivacyEngine
from dpivon.stacked import AnyNetwork
from dpivon.study.plan.data import StudyData, build_network, load_data
from dpivon.study.plan.plan import Plan, PlannedRun, first_seed, noise_seed, sample_seed, steps_of
from dpivon.study.results import table
from dpivon.study.results.folder import alone, claim
from dpivon.study.run.evaluation import predict_row, scores
from dpivon.study.run.settings import Outcome, Settings
from dpivon.study.run.work import facts

HOOKS = "hooks.csv"


def run_hooks(plan: Plan, out: Path, settings: Settings) -> Outcome:
    """Run what has no row in hooks.csv yet; a run that is stopped begins again."""
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if plan.augment is not None:
        fix = "Compare a plan without it"
        raise bad("augment", plan.augment, "is for stacks: the ordinary loop here makes no views", fix)
    deadline = time.monotonic() + 60 * settings.minutes if settings.minutes else float("inf")
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        claim(out, plan)
        data = load_data(plan, settings.data, device)
        for run in plan.runs:
            if run.id not in _done(out) and time.monotonic() < deadline:
                table.add(out / HOOKS, [_row(plan, run, data, device)])
    return Outcome(len(_done(out) & {run.id for run in plan.runs}), len(plan.runs))


def _done(out: Path) -> set[str]:
    return {row["id"] for row in table.read(out / HOOKS)}


def _row(plan: Plan, run: PlannedRun, data: StudyData, device: torch.device) -> dict[str, Any]:
    network = build_network(plan, data)
    assert isinstance(network, AnyNetwork)
    seed = noise_seed(plan, run) ^ 1  # another stream than the stack's, and a third for the noise
    model = network.model(network.initial(first_seed(plan, run)).to(device))
    options: dict[str, Any] = dict(run.options) | ({"rescale_lr": False} if run.method.startswith("dp-ivon") else {})
    total = steps_of(run, plan.epochs, data.size)
    options |= {"steps": float(total)} if "steps" in METHODS[run.method].defaults else {}
    learner = make(run.method, model, dataset_size=data.size, lr=run.lr, **options)
    engine = PrivacyEngine(accountant="rdp")
    loader: DataLoader[Any] = DataLoader(
        TensorDataset(data.images, data.labels),
        batch_size=run.batch_size,
        generator=torch.Generator().manual_seed(seed),
        collate_fn=_gathered,
    )
    private, optimizer, batches = learner.make_private(
        engine,
        loader,
        noise_multiplier=run.noise_multiplier,
        max_grad_norm=run.max_grad_norm,
        noise_generator=torch.Generator(device).manual_seed(seed ^ 2),
    )
    began = time.monotonic()
    while len(engine.accountant) < total:
        for x, y in batches:
            optimizer.zero_grad()
            with learner.sample():
                nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
            if len(engine.accountant) >= total:
                break
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    mean, std = posterior_rows(network, learner.posterior(), device)
    seed = sample_seed(plan, run)
    said = predict_row(network, mean, std, [data.eval_images], samples=plan.mc_samples, seed=seed)
    found = scores(said, data.eval_labels)
    spent = {"epsilon": engine.get_epsilon(plan.delta), "steps": total, "releases": len(engine.accountant)}
    made = {"seconds": seconds, "stack_size": 1, "stack_methods": 1, "precision": "float32"}
    return facts(plan, run, data.size, device) | spent | made | found


def _gathered(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*examples, strict=True)
    return torch.stack(images), torch.stack(labels)


def posterior_rows(network: AnyNetwork, posterior: Posterior, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as the network lays them out."""
    out = []
    for values in (posterior.mean, posterior.std):
        model = network.model(torch.zeros(network.size, device=device))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name])
        out.append(network.pack(model))
    return out[0], out[1]
