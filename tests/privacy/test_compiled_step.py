"""engine.compile: one function per step. On a CPU it is the eager loop; the padded program is recorded, not captured."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_runs import CapturingNoise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from compiled_runs import by_hand, private_run
from dpivon.errors import ArgumentError, PrivacyError
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.kernels.whole_step import WholeStep

N, B, CLASSES = 60, 10, 3


def network() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES)
    return nn.Sequential(*layers)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def made(kind: str = "ivon", views: int = 1, module: nn.Module | None = None, n: int = N, b: int = B, **options: Any):
    """Engine, model, optimizer and loader, all of whose draws are seeded."""
    torch.manual_seed(0)
    module = copy.deepcopy(module) if module is not None else network()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, views, 3, 6, 6, generator=generator), torch.randint(CLASSES, (n,), generator=generator)

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return x.flatten(0, 1), y.repeat_interleave(views)

    loader = DataLoader(TensorDataset(x, y), batch_size=b, collate_fn=collate)
    return private_run(module, loader, kind, augmentations=views, **options)


def trained(way: str, capacity: int | None = None, most: int | None = None, epochs: int = 4, **options: Any):
    """Parameters and ε after four epochs, with a scheduler of the step size and one of the noise."""
    engine, model, optimizer, loader = made(**options)
    engine.check(losses)
    step = engine.compile(losses, capture=way == "padded" or None, max_physical_batch_size=most)
    step.capacity = capacity or step.capacity
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(epochs):
        for batch in loader:
            if way == "loop":
                by_hand(losses, optimizer, model, batch, options.get("samples", 1))
            else:
                step(batch)
        decay.step()
        optimizer.noise_multiplier *= 0.9
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step.path == ("captured" if way == "padded" else "eager (on cpu)")
    assert capacity or most or all(program.whole.prepared for program in step._programs.values())
    return torch.cat([p.detach().flatten() for p in optimizer.params]), engine.get_epsilon(1e-3)


CASES = {
    "ivon": {},
    "adam": {"kind": "adam"},
    "θ-samples": {"samples": 2},
    "augmentations": {"views": 3},
    "per layer": {"clipping": "per_layer", "max_grad_norm": [0.3] * 6},
    "empty batches": {"n": 20, "b": 2},
    "two groups, reparameterised": {"kind": "ivon:reparam", "samples": 2},
    "averaged curvature": {"kind": "ivon:averaged"},
    "steady": {"kind": "dp-steady"},
    "calm": {"kind": "dp-calm"},
    "psgld": {"kind": "dp-psgld"},
}


@pytest.mark.campaign(keep=3)
@pytest.mark.filterwarnings("ignore:delta=0.001")
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_is_the_eager_loop(case):
    expected, epsilon = trained("loop", **CASES[case])
    eager, spent = trained("eager", **CASES[case])
    assert torch.equal(eager, expected)
    assert spent == epsilon
    padded, spent = trained("padded", **CASES[case])
    torch.testing.assert_close(padded, expected, rtol=1e-5, atol=1e-6)
    assert spent == epsilon


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "parts", [{"capacity": 6}, {"most": 4}, {"most": 4, "views": 3}, {"capacity": 6, "samples": 2}]
)
def test_a_batch_that_does_not_fit_runs_in_parts_of_one_release(parts):
    options = {key: value for key, value in parts.items() if key not in ("capacity", "most")}
    expected, epsilon = trained("loop", **options)
    for way in ("padded", "eager"):
        got, spent = trained(way, **parts)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert spent == epsilon


def test_a_release_is_charged_before_its_program_is_launched(monkeypatch):
    """Where the charge is refused nothing is drawn and nothing moves."""
    engine, _, optimizer, loader = made()
    step, events, charge, call = engine.compile(losses, capture=True), [], optimizer.charge, WholeStep.__call__
    monkeypatch.setattr(WholeStep, "__call__", lambda self, spec: (events.append("launched"), call(self, spec))[1])
    optimizer.charge = lambda spec: (events.append("charged"), charge(spec))[1]
    batches = iter(loader)
    for _ in range(4):
        step(next(batches))
    assert events == ["charged", "charged", *["charged", "launched"] * 2]  # the first are eager, and in parts
    optimizer.charge = refuse

    def held() -> list[Tensor]:
        drawing = optimizer.noise.generator.get_state(), optimizer.original_optimizer.generator.get_state()
        return [*drawing, *(p.detach().clone() for p in optimizer.params)]

    batch, before = next(batches), held()
    with pytest.raises(PrivacyError, match="refused"):
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, held(), strict=True))
    assert events[-1] == "launched"
    assert len(engine.accountant) == 4


def refuse(spec):
    raise PrivacyError("refused")


def test_noise_of_another_source_is_added_outside_the_program():
    """A mechanism or source of one's own, and σ = 0, are released as ever."""
    engine, _, optimizer, loader = made("sgd")
    step, batches = engine.compile(losses, capture=True), iter(loader)
    for _ in range(3):
        step(next(batches))
    (program,) = step._programs.values()
    optimizer.noise = noise = CapturingNoise()
    step(next(batches))
    assert program.whole.prepared
    assert len(noise.releases(len(optimizer.params))) == 1


class Unit(nn.Module):
    """Rows of length one: NaN for a row of zeros, as a padded one is."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def sums(
    way: str, batches: list[Any], module: nn.Module | None = None, bound: float = 0.5, capacity: int = 0, **options: Any
):
    """The clipped sums of these batches, as they are about to be noised."""
    engine, _, optimizer, loader = made("sgd", module=module, max_grad_norm=bound, **options)
    optimizer.noise = noise = CapturingNoise()
    step = engine.compile(losses, capture=way == "padded" or None)
    step.capacity = capacity or step.capacity
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
    drawn = iter(loader)
    for batch in [batches[0], *batches]:  # the first is run eagerly
        next(drawn)
        step(batch)
    assert step.path == ("captured" if way == "padded" else "eager (on cpu)")
    return noise.releases(len(optimizer.params))[1:]


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 6, 6, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_spare_rows_count_for_nothing_whatever_a_model_does_to_them():
    module = nn.Sequential(Unit(), *network())
    batches = [rows(9), rows(3, seed=1), rows(1, seed=2), rows(0), rows(5, seed=3)]
    batches[-1][0][2, 0, 0, 0] = torch.nan  # an example that is not finite counts for nothing either
    options = {"module": module, "poisson_sampling": False, "capacity": 12}
    expected = sums("eager", batches, **options)
    got = sums("padded", batches, **options)
    for padded, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(padded, eager, rtol=1e-5, atol=1e-7)
    assert float(got[3].abs().max()) == 0.0  # an empty batch
    assert all(bool(torch.isfinite(s).all()) for s in got)


def test_an_unmasked_spare_row_would_be_seen(monkeypatch):
    """The test above can fail: zeros are an ordinary input to most networks."""
    batches = [rows(9), rows(3, seed=1)]
    options = {"poisson_sampling": False, "capacity": 12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = sums("eager", batches, **options)
        monkeypatch.setattr(PaddedStep, "_pass", lambda self, model, batch, *spare: _unmasked(self, batch))
        got = sums("padded", batches, **options)
    assert float((got[1] - expected[1]).norm()) > 0.1


def _unmasked(step: PaddedStep, batch: Any) -> Tensor:
    each = step.losses(batch)
    each.sum().backward()
    return each.detach().sum()


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_no_example_moves_the_padded_sum_by_more_than_c(offset):
    """Coherent gradients and shifted activations, in batches that are padded, and in parts."""
    x, y = rows(200)
    x, y = x[:1] + 0.01 * x + offset, y[:1].expand(200).clone()
    keep = torch.arange(200) != 70
    for capacity in (230, 128):
        options = {"bound": 1.0, "poisson_sampling": False, "capacity": capacity}
        whole, less = sums("padded", [(x, y), (x[keep], y[keep])], **options)
        assert whole.dtype == torch.float64
        assert 0.5 < float((whole - less).norm()) <= 1 + 1e-5


def test_one_batch_is_released_once_in_parts_as_whole():
    for capacity in (60, 3):
        engine, _, _, loader = made(b=20)
        step = engine.compile(losses, capture=True)
        step.capacity = capacity
        drawn = iter(loader)
        step(next(drawn))
        batch = next(drawn)
        step(batch)
        with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
            step(batch)
        step(next(drawn))
        assert len(engine.accountant) == 3


def test_a_batch_that_failed_is_tried_again_and_charged_once():
    engine, _, _, loader = made()
    fail = [False]

    def sometimes(model: nn.Module, batch: Any) -> Tensor:
        if fail[0]:
            raise RuntimeError("out of luck")
        return losses(model, batch)

    step = engine.compile(sometimes, max_physical_batch_size=3)
    batch = next(iter(loader))
    step._make_sure(batch)
    fail[0] = True
    with pytest.raises(RuntimeError, match="out of luck"):
        step(batch)
    fail[0] = False
    step(batch)
    assert len(engine.accountant) == 1


def test_a_changed_bound_is_clipped_to():
    engine, _, optimizer, loader = made(b=N)
    optimizer.noise = noise = CapturingNoise()
    step = engine.compile(losses, capture=True)
    for bound in (1e-3, 1e-3, 1e-4, 1e-3):
        optimizer.max_grad_norm = bound
        step(next(iter(loader)))
    first, second, third, fourth = (float(r.norm()) for r in noise.releases(len(optimizer.params)))
    assert third < 0.2 * min(first, second, fourth)


@pytest.mark.parametrize(
    "loss_fn", [lambda m, b: losses(m, b).mean(), lambda m, b: losses(m, b)[:-1], lambda m, b: 1.0]
)
def test_a_loss_that_is_not_one_per_row_is_refused_before_any_release(loss_fn):
    engine, _, _, loader = made()
    step = engine.compile(loss_fn)
    with pytest.raises((ArgumentError, PrivacyError), match="loss_fn"):
        step(next(iter(loader)))
    assert len(engine.accountant) == 0


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("views", [False, True])
def test_on_a_cpu_images_run_in_parts_with_their_channels_last_and_learn_the_same(views):
    """As the whole batch does as it is; also where the network's `view` wants images as they are."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            assert seen.append(x.is_contiguous(memory_format=torch.channels_last)) is None
            return self[1](x.view(len(x), -1) if views else x.flatten(1))

    seen: list[bool] = []
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(100, 3, 16, 16, generator=generator), torch.randint(CLASSES, (100,), generator=generator)
    rows, net = [], Net(nn.Conv2d(3, 4, 3), nn.Linear(4 * 14 * 14, CLASSES))
    for given in (100, None):
        engine, _, optimizer, _ = made(module=net, poisson_sampling=False)
        step = engine.compile(losses, max_physical_batch_size=given)
        before = len(seen)
        for _ in range(2):
            step((x, y))
        rows.append(torch.cat([p.detach().flatten() for p in optimizer.params]))
    assert any(seen[before:])
    assert step._images is not views
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=1e-5)


def test_a_model_that_torch_compiled_learns_the_same_and_is_said_not_to_be_captured():
    rows = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = network()
        engine, _, optimizer, loader = made(module=torch.compile(module, backend="eager") if compiled else module)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = engine.compile(losses, capture=True if compiled else None)
        assert any("torch.compile was called on the model" in str(w.message) for w in told) == compiled
        step(next(iter(loader)))
        rows.append(torch.cat([p.detach().flatten() for p in optimizer.params]))
    assert step.path.startswith("eager (torch.compile")
    torch.testing.assert_close(rows[1], rows[0])


def test_compiling_comes_after_make_private():
    with pytest.raises(PrivacyError, match="before make_private"):
        dpivon.PrivacyEngine().compile(losses)


def test_a_loss_that_uses_autocast_is_checked_in_double_and_computed_in_bf16():
    def in_bf16(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(torch.is_autocast_enabled("cpu"))
            return losses(model, batch)

    seen: list[bool] = []
    engine, _, _, loader = made()
    step = engine.compile(in_bf16, capture=True)
    step(next(iter(loader)))
    assert seen[-1]
    assert not any(seen[:-1])

    def mixes(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            each = losses(model, batch)
            return each + 1e-3 * each.mean()  # less than bf16 can show

    engine, _, _, loader = made()
    with pytest.raises(PrivacyError, match="depends on the other rows"):
        engine.compile(mixes)(next(iter(loader)))
