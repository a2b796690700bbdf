"""engine.compile on a GPU: the captured step against the eager loop and the guarantee. Skipped where there is no GPU."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from compiled_runs import by_hand, private_run

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "privacy"))
from private_runs import CapturingNoise

import dpivon
from dpivon.models import CompactCNN

pytestmark = pytest.mark.usefixtures("in_full_precision")
DEVICE = torch.device("cuda")
N, B = 600, 64
PEOPLE = {"user_ids": [i % 250 for i in range(N)], "rows_per_user": 2}  # of two rows or three


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, 32, 32, generator=generator), torch.randint(0, 10, (N,), generator=generator)


def losses(model, batch):
    x, y = (t.to(DEVICE) for t in batch)
    return F.cross_entropy(model(x), y, reduction="none")


def in_bf16(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return losses(model, batch)


def made(kind="ivon", samples=1, **options):
    """Engine, model, optimizer and loader, all of whose draws are seeded."""
    torch.manual_seed(0)
    model = CompactCNN().to(DEVICE)
    loader = DataLoader(TensorDataset(*data()), batch_size=B, pin_memory=True)
    return private_run(model, loader, kind, samples, lr=1e-3, **options)


def trained(way, steps=12, capacity=None, most=None, **options):
    engine, model, optimizer, loader = made(**options)
    engine.check(losses)
    step = engine.compile(losses, max_physical_batch_size=most, capture=None if way == "captured" else False)
    step.capacity = capacity or step.capacity
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    done = 0
    while done < steps:
        for batch in loader:
            if way == "loop":
                by_hand(losses, optimizer, model, batch, options.get("samples", 1))
            else:
                step(batch)
            decay.step()
            done += 1
            if done == 8:  # a program must read both from the device
                optimizer.noise_multiplier *= 0.5
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if done == steps:
                break
    if way == "captured":
        assert step.path == "captured"
        assert all(program.captured for program in step._programs.values())
    row = torch.cat([p.detach().flatten() for p in optimizer.params]).cpu()
    return row, engine.get_epsilon(1e-3), optimizer


@pytest.mark.parametrize(
    "case",
    [{}, {"kind": "adam"}, {"samples": 2}, {"capacity": 64}, {"most": 24}, PEOPLE, PEOPLE | {"most": 50}],
    ids=["ivon", "adam", "θ-samples", "some overflow", "micro-batches", "people", "people in parts"],
)
def test_a_captured_step_is_the_eager_loop(case):
    """With a scheduler, the same noise, batches and θ-samples; the first steps are eager, the others replayed."""
    plain = {key: value for key, value in case.items() if key not in ("capacity", "most")}
    expected, epsilon, eager = trained("loop", **plain)
    got, spent, captured = trained("captured", **case)
    assert spent == epsilon
    start = torch.cat([p.detach().flatten() for p in _fresh().parameters()])
    moved = float((expected - start).norm())
    assert float((got - expected).norm()) < 1e-3 * moved
    states = [optimizer.state_dict()["state"] for optimizer in (eager, captured)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert state.keys() == states[1][key].keys()


def _fresh():
    torch.manual_seed(0)
    return CompactCNN()


def silent(model, batch):
    return losses(model, batch) * 0.0


@pytest.mark.parametrize("kind", ["ivon", "adam"])
def test_every_replay_has_noise_of_its_own_and_of_the_stated_width(kind):
    """Of a loss without a gradient all is noise, and σ is halved on the way."""
    engine, _, optimizer, loader = made(kind, noise_multiplier=1.0)
    step, released, widths = engine.compile(silent), [], []
    for batch in itertools.chain(loader, loader):
        if len(released) == 10:
            optimizer.noise_multiplier *= 0.5
        step(batch)
        assert optimizer.last_release is not None
        drawn = [g.flatten().double().cpu() for g in optimizer.last_release.gradients.values()]
        released.append(torch.cat(drawn))
        widths.append(optimizer.spec.noise_std / optimizer.spec.divisor)
    assert step.path == "captured"
    assert all(program.whole.prepared for program in step._programs.values())
    n = released[0].numel()
    for noise, width in zip(released, widths, strict=True):
        assert abs(float(noise.var()) / width**2 - 1) < 5 * math.sqrt(2 / n)
    for a, b in itertools.combinations(released, 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 6 / math.sqrt(n)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_no_example_moves_the_sum_that_a_captured_release_is_made_of():
    """The release itself, with and without one example, under the same noise."""
    x, y = data()
    x, y = x[:1] + 0.01 * x[:513], y[:1].expand(513).clone()
    engine, _, optimizer, _ = made("adam", max_grad_norm=1.0, poisson_sampling=False)
    step = engine.compile(losses)
    step.capacity = 560
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(6):
        step((x, y))
    (program,) = step._programs.values()
    assert program.whole.prepared
    noise, places, released = program.whole.generator.get_state(), step._places.get_state(), []
    for n in (513, 512):
        program.whole.generator.set_state(noise)
        step._places.set_state(places)  # everyone sits where they sat, and the last place is empty
        step((x[:n], y[:n]))
        gradients = optimizer.last_release.gradients.values()
        released.append(torch.cat([g.flatten().double() for g in gradients]) * optimizer.spec.divisor)
    assert 0.5 < float((released[0] - released[1]).norm()) <= 1 + 1e-4  # of a release in fp32


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("loss_fn", [losses, in_bf16])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_no_example_moves_the_captured_sum_by_more_than_c(loss_fn, offset):
    x, y = data()
    x, y = x[:1] + 0.01 * x[:513] + offset, y[:1].expand(513).clone()
    engine, _, optimizer, _ = made("adam", max_grad_norm=1.0, poisson_sampling=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.noise = noise = CapturingNoise()
    step = engine.compile(loss_fn)
    step.capacity = 560
    for _ in range(5):
        step((x, y))
    assert step.path == "captured"
    for gone in (0, 200, 512):
        order = torch.tensor([i for i in range(513) if i != gone] + [gone])
        places = step._places.get_state()
        noise.sums.clear()
        step((x[order], y[order]))
        step._places.set_state(places)  # everyone sits where they sat, and the last place is empty
        step((x[order[:-1]], y[order[:-1]]))
        whole, less = noise.releases(len(optimizer.params))
        assert 0.5 < float((whole - less).norm()) <= 1 + 1e-5


def test_a_captured_run_goes_on_from_its_folder_and_its_budget_never_falls(tmp_path):
    spent = []
    for _ in range(2):
        engine, _, optimizer, loader = made()
        step = engine.compile(losses)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = dpivon.Checkpoints(tmp_path, engine=engine, optimizer=optimizer, data_loader=loader)
            resumed = kept.restore()
        assert resumed.steps == len(spent) * 10
        for batch in loader:
            step(batch)
        assert step.path == "captured"
        kept.save()
        spent.append(engine.get_epsilon(1e-3))
        engine.ledger.close()
    assert spent[1] > spent[0]


def test_an_operation_of_a_captured_step_never_waits_for_the_device():
    engine, _, _, loader = made()
    step = engine.compile(losses)
    batches = iter(loader)
    for _ in range(6):
        step(next(batches))
    assert step.path == "captured"
    batch = next(batches)
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(batch)
    finally:
        torch.cuda.set_sync_debug_mode(before)
