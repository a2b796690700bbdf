"""The recipe from a prior: a private linear layer on what the prior's network sees, in flat coordinates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpivon
from dpivon import Accountant, ArgumentError, Augmentation, recipe
from dpivon.data.images import load_digits
from dpivon.durable.ledger import read
from dpivon.metrics import accuracy
from dpivon.models import PaperCNN, SmallCNN, WideResNet
from dpivon.priors import Features
from dpivon.priors import features as module
from dpivon.priors.features import flat, last_layers
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import LEDGER, history
from dpivon.privacy.temperature import calibrate_temperature, temperature_cost, temperature_noise

N = 300
PLAN: dict[str, Any] = {"target_epsilon": 4.0, "delta": 1e-5, "batch_size": 1000, "dataset_size": 10_000}
PLAN |= {"epochs": 3, "accountant": "rdp", "seed": 3}
TEMPERATURE = temperature_cost(temperature_noise(0.4, 1e-5, accountant="rdp"))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (N,), generator=generator)
    return torch.eye(3)[y] * 2 + torch.randn(N, 3, generator=generator), y


def network(classes: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, classes))


def public() -> Tensor:
    return torch.randn(500, 3, generator=torch.Generator().manual_seed(9))


def small() -> SmallCNN:
    torch.manual_seed(2)
    return SmallCNN()


def pictured(rows: int = 500) -> Tensor:
    return torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(4))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x[n], y[n]) for x, y in ((a.mean, b.mean), (a.variance, b.variance)) for n in {*x, *y})


# ---- features


def test_flat_coordinates_are_those_of_the_formula() -> None:
    """A Σ A = c² Σ (Σ + σ̄² I)⁻¹, by another way than eigenvectors; c makes the mean variance 1."""
    g = torch.Generator().manual_seed(0)
    seen = torch.randn(4000, 6, generator=g, dtype=torch.float64) @ torch.randn(6, 6, generator=g, dtype=torch.float64)
    seen = seen * torch.tensor([100.0, 10.0, 1.0, 0.1, 0.01, 0.0]) + 5
    mean, matrix = flat(seen)
    centred = seen - seen.mean(0)
    covariance = centred.T @ centred / len(seen)
    ratio = covariance @ torch.linalg.inv(covariance + covariance.diagonal().mean() * torch.eye(6, dtype=torch.float64))
    z = (seen - mean.double()) @ matrix.double()
    found = z.T @ z / len(z)
    torch.testing.assert_close(found, ratio * 6 / ratio.trace(), rtol=1e-4, atol=1e-4)
    assert abs(float(found.diagonal().mean()) - 1) < 1e-5


def by_hand(model: SmallCNN, x: Tensor) -> Tensor:
    """What the last layers see, and the first block's map before pooling, over 2 × 2 places."""
    block = model.features.block1
    early = block.relu(block.norm(block.conv(x)))
    return torch.cat([model.features(x).flatten(1), nn.functional.avg_pool2d(early, 4).flatten(1)], 1).detach()


def test_features_are_the_mean_over_moved_copies_of_maps_and_of_what_the_last_layers_see() -> None:
    model, x = small(), pictured()
    made = Features(model, x, shift=1, mirror=True)
    assert (made.cut, made.parts, made.width) == ("head.hidden", (128, 64), 192)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    copies = [padded[..., i : i + 8, j : j + 8] for i, j in ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))]
    each = [by_hand(model, c) for copy in copies for c in (copy, copy.flip(-1))]
    torch.testing.assert_close(made(x), (torch.stack(each).mean(0) - made.mean) @ made.matrix, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(Features(model, x).seen(x), by_hand(model, x), rtol=1e-5, atol=1e-6)
    assert not any(p.requires_grad for p in made.parameters())


def test_every_part_of_the_features_has_the_same_share_of_flat_coordinates() -> None:
    model, x = small(), pictured()
    before = Features(model, x)
    with torch.no_grad():
        model.features.block1.norm.weight.mul_(1e3)
        model.features.block1.norm.bias.mul_(1e3)
        model.features.block2.conv.weight.div_(1e3)
    torch.testing.assert_close(Features(model, x)(x), before(x), rtol=1e-2, atol=1e-2)


def test_maps_are_the_last_at_every_resolution_that_weights_follow() -> None:
    assert Features(PaperCNN(), torch.randn(500, 3, 32, 32)).parts == (2048, 512, 1024)  # not the third block's again
    # 64, 128 and 256 channels at 32, 16 and 8: as many places as give no more features than the last layer sees.
    network = WideResNet(depth=10, width=1, groups=4, relu_first=True)
    assert Features(network, torch.randn(500, 3, 32, 32)).parts == (64, 64, 32)
    assert Features(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), pictured()).parts == (64,)


class Shows(nn.Module):
    """A network whose second module shows something else of the first map, by the side."""

    def __init__(self, show: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.shown = nn.Conv2d(1, 3, 3, padding=1), Shown(show)
        self.down, self.last = nn.Conv2d(3, 3, 3, stride=2, padding=1), nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.shown(x)
        out: Tensor = self.last(self.down(x).flatten(1))
        return out


class Shown(nn.Module):
    def __init__(self, show: Any) -> None:
        super().__init__()
        self.show = show

    def forward(self, x: Tensor) -> Any:
        return self.show(x)


@pytest.mark.parametrize(
    "show",
    [
        lambda x: x > 0,
        lambda x: torch.fft.fft2(x),
        lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(-1, 1, 2, 2),  # patches, as a batch of their own
        lambda x: torch.ones(8, 3, 3, 3),  # weights, as a parametrisation gives them
        lambda x: (x, None),
    ],
)
def test_what_is_no_map_of_one_example_is_not_among_the_features(show: Any) -> None:
    assert Features(Shows(show), pictured()).parts == (48, 48)


def test_a_map_that_is_always_the_same_in_public_is_not_blown_up() -> None:
    made = Features(Shows(lambda x: 7 * torch.ones(1, 3, 5, 5)), pictured())
    assert made.parts == (48, 48, 48)
    assert float(made(pictured(50)).abs().max()) < 20
    assert float(made(pictured(50)).std(0)[-48:].max()) < 1e-2
    once = Features(Shows(lambda x: (x.mean((2, 3), keepdim=True) - 50).relu().expand(1, 3, 5, 5)), pictured())
    bright = pictured(50) + 1e3
    assert float(once(bright).abs().max()) < 1e5


class AnySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 64, 3, stride=2, padding=1)
        self.last = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.down(self.conv(x)).mean((2, 3)))
        return out


def test_images_of_a_size_that_gives_other_features_are_named() -> None:
    made = Features(AnySize(), pictured())
    assert made.parts == (64, 32)
    with pytest.raises(ArgumentError, match=r"inputs=\(1, 1, 1\): have other numbers of features than the public"):
        made(torch.zeros(3, 1, 1, 1))
    assert made.parts == (64, 32)
    assert made(torch.zeros(3, 1, 16, 16)).shape == (3, 96)


def test_features_that_were_saved_before_maps_were_among_them_are_as_they_were() -> None:
    made = Features(AnySize(), pictured())
    del made.parts
    made.mean, made.matrix, made.width = made.mean[:64], made.matrix[:64, :64], 64
    x = pictured(5)
    seen = made.body.down(made.body.conv(x)).mean((2, 3))
    torch.testing.assert_close(made(x), (seen - made.mean) @ made.matrix, rtol=1e-4, atol=1e-4)


def test_an_examples_features_are_of_that_example_alone() -> None:
    x = pictured()
    made = Features(small(), x, shift=1)
    other = x.clone()
    other[1:] = float("nan")
    other[5:] = 1e6
    torch.testing.assert_close(made(other)[:1], made(x)[:1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made(x[:1]), made(x)[:1], rtol=1e-4, atol=1e-4)


class Odd(nn.Module):
    """A network that does with a batch what no private training may let it do."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.kept = what, torch.zeros(0)
        self.first = nn.Conv2d(1, 4, 3)
        self.batch = nn.BatchNorm2d(4, track_running_stats=what != "own statistics")
        self.last = nn.Linear(4, 2)
        self.register_buffer("moved", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "keeps":
            self.kept = x
        if self.what == "guard" and not torch.isfinite(x).all():
            x = torch.zeros_like(x)
        seen = self.batch(self.first(x)).relu().mean((2, 3))
        if self.what == "mean":
            seen = seen - 0.5 * seen.mean(0)
        if self.what == "buffer":
            self.moved.mul_(0.9).add_(seen.mean(0))
        if self.what == "first come":
            seen = seen * (torch.arange(len(seen)) < 3).unsqueeze(1)
        if self.what == "draws":
            seen = seen + torch.randn_like(seen)
        out: Tensor = self.last(seen)
        return out


@pytest.mark.parametrize("what", ["plain", "keeps", "mean", "first come", "own statistics"])
@pytest.mark.parametrize("training", [False, True])
def test_what_a_network_would_do_with_a_batch_changes_nothing(what: str, training: bool) -> None:
    public_ = torch.randn(500, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    made = nn.Sequential(Features(Odd(what), public_)).train(training)[0]
    x = pictured(20)
    other = x.clone()
    other[1:10] = 1e3 * other[1:10].flip(0)
    other[10:] = float("nan")
    torch.testing.assert_close(made(other)[0], made(x)[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made(x.flip(0)).flip(0), made(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made(x[:1])[0], made(x)[0], rtol=1e-4, atol=1e-4)
    assert not any(t.numel() for name, t in vars(made.body).items() if isinstance(t, Tensor))
    assert made.body.batch.num_batches_tracked in (None, 0)


@pytest.mark.parametrize("what", ["guard", "buffer", "draws"])
def test_a_network_that_cannot_run_on_one_example_by_itself_is_refused(what: str) -> None:
    with pytest.raises(ArgumentError, match=r"network='Odd': cannot run on one example of shape \(1, 8, 8\) by itself"):
        Features(Odd(what), pictured(500))


def test_a_normalisation_that_someone_puts_into_training_mode_is_refused() -> None:
    made = Features(Odd("plain"), pictured(500))
    made.body.train()
    with pytest.raises(ArgumentError, match="by itself"):
        made(pictured(5))


def test_the_layers_that_give_way() -> None:
    assert last_layers(PaperCNN()) == "head.hidden"
    assert last_layers(network()) == "2"
    assert last_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))) == "3"
    tailed = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    assert last_layers(tailed) == "2"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Features(small(), pictured(40)), "public=40: is not a tensor of 500 rows"),
        (lambda: Features(small(), [1, 2]), "public='list': is not a tensor of 500 rows"),
        (lambda: Features(small(), pictured(1).expand(500, 1, 8, 8)), "features that are all alike"),
        (lambda: Features(small(), pictured(), shift=8), "are not images that can be moved so far"),
        (lambda: Features(small(), torch.randn(500, 3, 8, 8)), r"cannot run on one example of shape \(3, 8, 8\)"),
        (lambda: Features(nn.Conv2d(1, 2, 3), pictured()), "does not end in a linear layer"),
        (lambda: Features(nn.Linear(3, 2), public()), "does not end in a linear layer"),
        (lambda: Features(network(), public(), shift=1), r"public=\(500, 3\): are not images"),
        (lambda: Features(small(), pictured() * float("nan")), "features that are not finite"),
        (lambda: Features.of(small(), "strokes-9", (1, 8, 8)), "neither a prior by name nor a file"),
        (lambda: Features.of(small(), "images-32", (3, 32, 32)), "is not of this network"),
        (lambda: Features.of(small(), "strokes-8", (1, 8, 9)), r"inputs=\(1, 8, 9\): is not the shape of square"),
        (lambda: Features.of(small(), plain(small()), (1, 8, 8)), "names no random process"),
        (lambda: Features.of(small(), plain(small(), method="dp-steady"), (1, 8, 8)), "was trained by dp-steady"),
    ],
)
def test_what_gives_no_features_is_named(make: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()


def plain(model: nn.Module, **metadata: str) -> dpivon.Posterior:
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    return dpivon.Posterior(named, {n: torch.ones_like(p) for n, p in named.items()}, metadata)


def test_too_many_features_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 100)
    with pytest.raises(ArgumentError, match="gives 128 features, and 2 to 100 can be flattened"):
        Features(small(), pictured())


def test_a_prior_of_pixels_at_another_scale_is_flattened_on_images_of_that_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "IMAGES", 512)
    model = small()
    prior = dpivon.priors.start_from(model, "strokes-8", input_mean=0.0, input_std=1.0)
    by_posterior = Features.of(SmallCNN(), prior, (1, 8, 8))
    by_name = Features.of(SmallCNN(), "strokes-8", (1, 8, 8), input_mean=0.0, input_std=1.0)
    x = pictured().sigmoid()
    torch.testing.assert_close(by_posterior(x), by_name(x), rtol=1e-4, atol=1e-4)
    assert (by_name.shift, by_name.mirror) == (1, False)
    assert dpivon.priors.start_from(PaperCNN(), "images-32").metadata["mirror"] == "yes"  # so has its posterior


# ---- the recipe


def test_it_is_the_recipe_on_features_and_predicts_from_inputs() -> None:
    x, y = data()
    features = Features(network(7), public())
    trained: Any = dpivon.steady(network(), x, y, start_from=features, **PLAN)
    zero = nn.Linear(8, 3)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    by_hand: Any = dpivon.steady(zero, features(x), y, **PLAN)
    assert same(trained.predictor.posterior, by_hand.predictor.posterior)
    assert trained.temperature == by_hand.temperature != 1.0
    assert trained.predictor.history == [(trained.predictor.budget.noise_multiplier, 0.1, 30), TEMPERATURE]
    assert 3.98 < trained.predictor.account.get_epsilon(1e-5) <= 4.0
    ours, theirs = trained.predict(x, samples=0), by_hand.predict(features(x), samples=0)
    torch.testing.assert_close(ours.probs, theirs.probs)
    assert accuracy(ours.probs, y) > 0.6
    batches = trained.predict([(x[:100], y[:100]), (x[100:], y[100:])], samples=0)
    torch.testing.assert_close(batches.probs, ours.probs)


def test_the_temperature_is_chosen_on_held_out_examples_where_few_can_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    features = Features(network(7), public())
    plan = {**PLAN, "batch_size": 30}
    del plan["dataset_size"]
    noise = temperature_noise(0.4, 1e-5, accountant="rdp")
    monkeypatch.setattr(recipe, "WORTH", recipe.blur(noise, 15))  # which 15 of the 300 are blurred by
    trained: Any = dpivon.steady(network(), x, y, start_from=features, **plan)
    held = recipe._left_out(x, y, 15 / N)
    assert 5 <= held.sum() <= 30
    assert trained.predictor.budget.dataset_size == N - 15  # public: not how many there are
    layer, seen = features.last_layer(3), features(x)
    kept: Any = dpivon.steady(layer, seen[~held], y[~held], **plan, dataset_size=N - 15)
    assert same(kept.predictor.posterior, trained.predictor.posterior)  # they are not trained on
    chosen: dict[str, Any] = {"noise_multiplier": noise, "samples": 32, "account": Accountant()}
    chosen["generator"] = torch.Generator().manual_seed(PLAN["seed"] ^ 0x7E3F)
    assert trained.temperature == calibrate_temperature(trained.predictor, (x[held], y[held]), **chosen).temperature
    # Charged in full, as if they were trained on too.
    assert trained.predictor.history[-1] == TEMPERATURE
    assert 3.9 < trained.predictor.account.get_epsilon(1e-5) <= 4.0
    # More than a twentieth would be needed: none.
    monkeypatch.setattr(recipe, "WORTH", recipe.blur(noise, 16))
    every: Any = dpivon.steady(network(), x, y, start_from=features, **plan)
    assert every.predictor.budget.dataset_size == N
    assert every.temperature != 1.0
    # A layer that is trained from scratch holds none out, unless it is to.
    alone: Any = dpivon.steady(layer, seen, y, **plan)
    assert same(alone.predictor.posterior, every.predictor.posterior)
    asked: Any = dpivon.steady(layer, seen, y, held_out=0.2, **plan)
    assert asked.predictor.budget.dataset_size == N - 16
    for wrong, given in ((-1, {}), (1.0, {}), (0.1, {"dataset_size": N})):
        with pytest.raises(ArgumentError, match=f"held_out={wrong}"):
            dpivon.steady(layer, seen, y, held_out=wrong, **plan, **given)
    with pytest.raises(ArgumentError, match=r"held_out=0\.1"):
        dpivon.steady(layer, TensorDataset(seen, y), held_out=0.1, **plan)


def test_an_example_that_is_removed_moves_no_other_into_or_out_of_the_training() -> None:
    x, y = data()
    x[50:90], y[50:90] = x[0], y[0]  # alike, and with another label too
    y[80:90] = (y[0] + 1) % 3
    rows = [(*row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]

    def held_out(kept: list[int]) -> Counter[Any]:
        held = recipe._left_out(x[kept], y[kept], 0.05).tolist()
        return Counter((rows[i], out) for i, out in zip(kept, held, strict=True))

    whole = held_out(list(range(N)))
    assert {out for (row, out), _ in whole.items() if row == rows[0]} == {False, True}
    for gone in (0, 1, 20, 70, 85, N - 1):
        without = held_out([i for i in range(N) if i != gone])
        assert sum((whole - without).values()) == 1
        assert not without - whole


def test_a_full_batch_stays_one_and_other_labels_are_named_where_examples_are_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = data()
    monkeypatch.setattr(recipe, "WORTH", recipe.blur(temperature_noise(0.4, 1e-5, accountant="rdp"), 15))
    given: dict[str, Any] = {**PLAN, "start_from": Features(network(7), public()), "batch_size": N}
    del given["dataset_size"]
    assert dpivon.steady(network(), x, y, **given).predictor.budget.sample_rate == 1.0  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="batch_size=301: is larger than"):
        dpivon.steady(network(), x, y, **{**given, "batch_size": N + 1})
    with pytest.raises(ArgumentError, match="batch_size='many': is not a number"):
        dpivon.steady(network(), x, y, **{**given, "batch_size": "many"})
    with pytest.raises(ArgumentError, match="labels=295: does not match 300 inputs"):
        dpivon.steady(network(), x, y[:-5], **given)
    with pytest.raises(ArgumentError, match="labels=None: is missing"):
        dpivon.steady(nn.Linear(3, 3), x, held_out=0.05, **{**given, "start_from": None})


def test_a_prior_by_name_learns_digits_where_scratch_does_not() -> None:
    digits = load_digits()
    x, held = digits.train.x * 4 - 2, digits.validation.x * 4 - 2  # (p − 0.5)/0.25
    plan: dict[str, Any] = {"target_epsilon": 1.0, "delta": 1e-4, "batch_size": 256, "epochs": 40, "accountant": "rdp"}
    found = []
    for start in (None, "strokes-8"):
        trained = dpivon.steady(small(), x, digits.train.y, start_from=start, seed=0, **plan)
        found.append(accuracy(trained.predict(held, samples=0).probs, digits.validation.y))
    assert found[1] > 0.93
    assert found[1] > found[0] + 0.05


def test_a_kept_run_and_a_data_set_are_the_same_recipe(tmp_path: Path) -> None:
    x, y = data()
    given = {**PLAN, "start_from": Features(network(7), public())}
    free: Any = dpivon.steady(network(), x, y, **given)
    dataset: Any = dpivon.steady(network(), TensorDataset(x, y), **given)
    assert same(free.predictor.posterior, dataset.predictor.posterior)
    out = tmp_path / "run"

    def stop(done: int, steps: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dpivon.steady(network(), x, y, **given, out=out, on_progress=stop)
    spent = epsilon(history(read(out / LEDGER), 0), 1e-5, "rdp")
    whole: Any = dpivon.steady(network(), x, y, **given, out=tmp_path / "whole")
    for _ in range(2):  # the second finds it finished
        kept: Any = dpivon.steady(network(), x, y, **given, out=out)
        assert same(kept.predictor.posterior, whole.predictor.posterior)
        record = read(out / LEDGER)
        assert record.releases == 30 + TEMPERATURE[2]
        assert kept.predictor.history == history(record, 0) == free.predictor.history
        assert spent < kept.predictor.account.get_epsilon(1e-5) <= 4.0
        assert torch.equal(kept.predictor.predict(x, 0).label, whole.predict(x, samples=0).label)


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (lambda: nn.Conv1d(3, 3, 1), {}, "model='Conv1d': has no linear layer"),
        (network, {"start_from": network()}, "start_from='Sequential': is no prior"),
        (network, {"start_from": "images-64"}, "neither a prior by name nor a file"),
        (network, {"start_from": "images-32"}, "is not of this network"),
        (network, {"start_from": plain(network())}, "names no random process"),
        (network, {"start_from": plain(network(), method="dp-steady")}, "was trained by dp-steady, and what that cost"),
        (network, {"augment": Augmentation(2, flip=True)}, "augment=.*was given with start_from"),
        (network, {"labels": None}, "labels=None: is missing"),
        (network, {"inputs": TensorDataset(*data())}, "labels='Tensor': was given with a Dataset"),
        (network, {"inputs": TensorDataset(data()[0]), "labels": None}, "is not a Dataset of pairs"),
        (network, {"evaluate": lambda learner: {}}, "evaluate=.*was given with start_from"),
        (network, {"lr": -1.0}, "lr=-1.0"),
        (network, {"options": {"raise": 1.0}}, "are not options of 'dp-steady'"),
        (network, {"noise_multiplier": 1.0}, "both were given"),
        (network, {"target_epsilon": 0.0}, "target_epsilon=0"),
    ],
)  # fmt: skip
def test_what_cannot_begin_so_is_named_and_nothing_is_released(model: Any, given: dict[str, Any], said: str) -> None:
    x, y = data()
    options = {**PLAN, "start_from": Features(network(7), public()), "inputs": x, "labels": y, **given}
    with pytest.raises(ArgumentError, match=said):
        dpivon.steady(model(), **options)
