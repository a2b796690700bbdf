"""A last layer on a prior's features, and all weights in flat coordinates: what rows say, spend and are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.leaderboard import board, flat, linear
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import Split
from experiments.leaderboard.wide.network import wide
from torch import Tensor, nn

from dpivon.models import PaperCNN
from dpivon.priors import features, start_from
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.temperature import temperature_cost, temperature_noise


def parts(*given: Any) -> dict[str, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (600,), generator=g)
    x = 3 * torch.eye(10)[y] + torch.randn(600, 10, generator=g)
    return {"train": (x[:400], y[:400]), "test": (x[400:], y[400:])}


def test_a_row_spends_what_it_says_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "made", parts)
    table = tmp_path / "linear.csv"
    words = ["paper", "--data", "-", "--work", "-", "--table", str(table), "--batch", "50", "--epochs", "4"]
    words += ["--epsilons", "8", "--arms", "dp-steady", "dp-sgd:1"]
    linear.main(words)
    rows = tables.read(table)
    assert [row["method"] for row in rows] == ["dp-steady", "dp-sgd"]
    assert [row["split"] for row in rows] == ["validation"] * 2
    assert {row["train_size"] for row in rows} == {"360"}  # a tenth is held out
    spent = [float(row["epsilon_spent"]) for row in rows]
    assert 7.9 < spent[0] <= 8.0
    assert 7.5 < spent[1] < spent[0]  # it pays for no temperature, and leaves the room for one
    assert float(rows[1]["noise_multiplier"]) > float(rows[0]["noise_multiplier"])  # so few data have none
    linear.main([*words, "--judge"])
    judged = tables.read(table)[2:]
    assert [row["train_size"] for row in judged] == ["400"] * 2
    before = table.read_bytes()
    linear.main([*words, "--judge"])
    assert table.read_bytes() == before


def test_committed_rows_are_what_the_page_says() -> None:
    rows = tables.read(board.HERE / "results" / "linear.csv")
    assert {row["network"] for row in rows} <= {"paper", "wide", "plain"}
    for row in rows:
        target, spent = float(row["epsilon"]), float(row["epsilon_spent"])
        if row["method"] != linear.RECIPE:  # planned with the recipe's temperature, and fitted without
            steps = float(row["noise_multiplier"]), int(row["batch"]) / int(row["train_size"]), int(row["steps"])
            spent = epsilon(
                [steps, temperature_cost(temperature_noise(0.1 * target, linear.DELTA))], linear.DELTA, "pld"
            )
        assert 0.99 * target < spent <= target
        assert row["lr"] == "" or row["method"] != linear.RECIPE or row["network"] == "plain"  # the defaults
    judged = [row for row in rows if row["split"] == "test"]
    assert {row["seed"] for row in judged} <= {"1", "2", "3"}
    assert not {row["seed"] for row in rows if row["split"] != "test"} & {row["seed"] for row in judged}


def test_bars_are_met_by_numbers_alone() -> None:
    rows = [{"accuracy": "0.66", "nll": "0.98", "ece": "0.02"}]
    told = [board._against(rows, name, aim) for name, aim in (("accuracy", 0.66), ("nll", 0.98), ("ece", 0.02))]
    assert [cell.split(":")[0] for cell in told] == ["met", "missed", "met"]
    assert board._against(rows, "accuracy", 0.661).startswith("missed: 66.0")
    assert board._against([], "nll", 1.0) == "not run"


@pytest.mark.slow
def test_features_of_the_wide_prior_are_of_its_three_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        features, "flat", lambda seen: (seen.mean(0), torch.eye(seen.shape[1]))
    )  # the roots take minutes
    made = linear.features_of("wide", tmp_path, torch.device("cpu"), toy=True)
    assert (made.cut, made.parts, made.shift, made.mirror) == ("head", (4096, 1024, 2048), 2, True)
    z = made(linear.process_images("wide", 512))
    for part in z.split(made.parts, 1):
        assert abs(float(part.var(0).mean()) - 1) < 0.01
    assert float(z.mean(0).abs().max()) < 1e-3


@pytest.fixture(scope="module")
def flat_cnn() -> tuple[features.Features, flat.FlatNetwork, Tensor]:
    network = PaperCNN()
    start_from(network, "images-32")
    images = linear.process_images("paper", 512)
    seen = features.Features(network, images)
    return seen, flat.FlatNetwork(seen, images, 0.1), images


@pytest.mark.slow
def test_a_network_in_flat_coordinates_begins_as_the_prior_with_its_head(flat_cnn: Any) -> None:
    made, model, images = flat_cnn
    x = images[:20]
    torch.testing.assert_close(model.seen(x), made.seen(x), rtol=1e-4, atol=1e-4)
    head = nn.Linear(made.width, 10)
    model.take(head)
    torch.testing.assert_close(model(x), head((made(x) + made(x.flip(-1))) / 2), rtol=1e-3, atol=1e-3)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "body.features.block1.conv.theta.weight": (32, 32, 1, 1),  # 27 numbers of a patch, and 5 zeros
        "body.features.block2.conv.theta.weight": (64, 288, 1, 1),
        "body.features.block3.conv.theta.weight": (128, 576, 1, 1),
        "head.weight": (10, 3584),
        "head.bias": (10,),
    }


@pytest.mark.slow
def test_patches_are_flat_in_units_of_the_prior(flat_cnn: Any) -> None:
    """Patches whose covariance is taken as it is, by an inverse in place of eigenvectors."""
    _, model, images = flat_cnn
    conv = model.body.features[0].conv
    seen = conv.flat(images[:200])[:, :27].transpose(0, 1).flatten(1).double().detach()
    patches = torch.nn.functional.unfold(images[:200], 3, padding=1).transpose(0, 1).flatten(1).double()
    covariance, found = patches.cov(), seen.cov()
    ratio = covariance @ torch.linalg.inv(covariance + covariance.diagonal().mean() * torch.eye(27))
    unit = 27 / ratio.trace()
    root = torch.linalg.cholesky(unit * torch.linalg.inv(covariance + covariance.diagonal().mean() * torch.eye(27)))
    size = (conv.conv.weight.detach().double().flatten(1) @ torch.linalg.inv(root).T).square().mean()
    torch.testing.assert_close(found / size, unit * ratio, rtol=0.1, atol=0.05)


@pytest.mark.slow
def test_a_flat_head_and_flat_weights_together_spend_epsilon(flat_cnn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, images = flat_cnn
    monkeypatch.setattr(flat, "BATCH", 8)
    monkeypatch.setattr(flat, "HEAD_STEPS", 2)
    y = torch.randint(0, 10, (512,), generator=torch.Generator().manual_seed(0))
    split = Split("validation", images[:40], y[:40], images[40:60], y[40:60], images[40:60], y[40:60])
    cells = [flat.Cell("paper", e, method, 0.3, 0.4, 0, 3, 0.1) for e, method in ((2.0, "dp-steady"), (8.0, "dp-sgd"))]
    group = flat.Group(cells, split, made, made(split.images))
    rows = group.rows(group.train())
    for row, cell in zip(rows, cells, strict=True):
        assert 0.98 * cell.epsilon < row["epsilon_spent"] <= cell.epsilon
        assert set(row) == set(flat.COLUMNS)
        moved = flat.epsilon([cell.head.cost(row["head_noise_multiplier"])], flat.DELTA, flat.ACCOUNTANT)
        assert moved == pytest.approx(0.4 * cell.epsilon, rel=0.01)


@pytest.mark.slow
def test_a_wide_network_in_flat_coordinates_begins_as_its_prior() -> None:
    torch.manual_seed(0)
    images = torch.randn(500, 3, 32, 32)
    made = features.Features(wide(toy=True, places=4), images)
    model = flat.FlatNetwork(made, images[:200], 0.1)
    torch.testing.assert_close(model.seen(images[:20]), made.seen(images[:20]), rtol=1e-4, atol=1e-4)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    convolutions = [name for name, m in made.body.named_modules() if isinstance(m, nn.Conv2d)]
    assert trained == [*(f"body.{name}.theta.weight" for name in convolutions), "head.weight", "head.bias"]
    with torch.no_grad():
        model.body.blocks[0].conv1.theta.weight.normal_()
        assert float((model.seen(images[:20]) - made.seen(images[:20])).abs().max()) > 0.01
