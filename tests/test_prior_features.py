"""What a prior's network sees, in flat coordinates: the features that a private linear layer is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpivon
from dpivon import ArgumentError
from dpivon.models import PaperCNN, SmallCNN, WideResNet
from dpivon.priors import Features
from dpivon.priors import features as module
from dpivon.priors.features import flat, last_layers
from prior_cases import network, pictured, plain, public, small


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


def test_what_is_saved_is_what_is_loaded_whatever_weights_the_network_has(tmp_path: Path) -> None:
    x, path = pictured(), tmp_path / "features.safetensors"
    made = Features(small(), x, shift=1, mirror=True)
    made.save(path)
    loaded = Features.load(path, SmallCNN())
    assert torch.equal(loaded(x[:20]), made(x[:20]))
    assert (loaded.width, loaded.parts, loaded.shift, loaded.mirror) == (192, (128, 64), 1, True)
    assert not any(p.requires_grad for p in loaded.parameters())
    with pytest.raises(ArgumentError, match="does not hold the features of this network"):
        Features.load(path, PaperCNN())
    torch.save(made, tmp_path / "pickled")
    with pytest.raises(ArgumentError, match="pickled"):
        Features.load(tmp_path / "pickled", SmallCNN())
    mean, made.mean = made.mean, made.mean.unsqueeze(1)
    made.save(path)
    with pytest.raises(ArgumentError, match="does not hold the features of this network"):
        Features.load(path, SmallCNN())
    made.mean, made.matrix = mean, made.matrix[:100]
    made.save(path)
    with pytest.raises(ArgumentError, match="holds values that no features have"):
        Features.load(path, SmallCNN())


def test_side_by_side_examples_have_the_same_features() -> None:
    for model, x in ((small(), pictured()), (WideResNet(depth=10, width=1, groups=4), torch.randn(500, 3, 8, 8))):
        made = Features(model, x, shift=1, mirror=True)
        torch.testing.assert_close(made.together(x[:9]) @ made.matrix, made(x[:9]), rtol=1e-3, atol=1e-4)


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
