"""First weights from priors that no one's data is in, and what a private prior costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import dpivon
from dpivon import priors
from dpivon.cli import app
from dpivon.durable.tensors import read_tensors
from dpivon.errors import ArgumentError
from dpivon.models import PaperCNN, SmallCNN
from dpivon.priors import start_from
from dpivon.priors.learning import FORMAT, VERSION, state_of
from dpivon.privacy.accounting import epsilon


def test_a_built_in_prior_fits_any_number_of_classes_and_any_scale_of_inputs() -> None:
    torch.manual_seed(0)
    one, other = PaperCNN(classes=7), PaperCNN(classes=7)
    found = start_from(one, "images-32")
    assert found.metadata["method"] == "random process"
    assert found.matches(one)
    assert all(torch.equal(found.mean[n], p) for n, p in one.named_parameters())
    assert not one.head.logits.weight.any()
    for name in ("head.logits.weight", "head.logits.bias"):  # loose, since its zeros tell nothing
        assert torch.equal(found.variance[name], torch.ones_like(found.variance[name]))
    # The same function of pixels, whatever their scale; away from the border, where padding is of the scale itself.
    start_from(other, "images-32", input_mean=0.0, input_std=1.0)
    pixels = torch.rand(2, 3, 32, 32)
    seen = one.features.block1.conv((pixels - 0.5) / 0.25), other.features.block1.conv(pixels)
    torch.testing.assert_close(*(s[..., 2:-2, 2:-2] for s in seen), rtol=1e-4, atol=1e-4)


def test_the_digits_prior_is_what_its_command_makes(tmp_path: Path) -> None:
    """docs/priors.md has the command; here it runs for two steps."""
    documented = (Path(__file__).parents[1] / "docs" / "priors.md").read_text()
    command = next(line for line in documented.splitlines() if line.endswith("--out strokes-8.safetensors"))
    out = tmp_path / "made.safetensors"
    few = ["--steps", "2", "--pool", "64", "--batch", "8", "--out", str(out)]
    made = CliRunner().invoke(app, [*command.split()[1:], *few])
    assert made.exit_code == 0, made.output
    shipped = Path(priors.__file__).parent / "strokes-8.safetensors"
    assert shipped.stat().st_size < 100_000
    known = {"key": FORMAT, "version": VERSION, "what": "prior", "fix": ""}
    (ours, said), (theirs, says) = (read_tensors(path, **known) for path in (shipped, state_of(out)))
    kept = {n: t.shape for n, t in theirs.items() if not n.startswith(("projection.", "head.logits."))}
    assert {n: t.shape for n, t in ours.items()} == kept
    assert said["process"] == says["process"] == "strokes"
    for part in ("batch=256", "pool=65536", "steps=10000"):
        assert part in said["settings"]
        assert f"--{part.replace('=', ' ')}" in command
    start_from(SmallCNN(classes=3), "strokes-8")


def test_a_prior_of_another_network_changes_nothing() -> None:
    model = PaperCNN(in_channels=1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ArgumentError, match=r"has another features\.block1\.conv\.weight"):
        start_from(model, "images-32")
    with pytest.raises(ArgumentError, match="neither a prior by name nor a file"):
        start_from(model, "images-64")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_train_begins_with_a_prior_and_refuses_one_whose_cost_it_does_not_have(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(8):
            pixels = np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{i}.png")
    words = ["train", str(tmp_path / "data"), "--classes", "a,b", "--epsilon", "3", "--delta", "1e-3", "--epochs", "1"]
    words += ["--dataset-size", "16", "--batch-size", "8", "--lr", "1e-6", "--method", "dp-sgd", "--proceed", "-q"]
    found = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run"), "--start-from", "images-32"])
    assert found.exit_code == 0, found.output
    trained = dpivon.Posterior.load(tmp_path / "run" / "model" / "posterior.safetensors")
    start = start_from(PaperCNN(classes=2), "images-32", input_std=0.5)
    torch.testing.assert_close(trained.mean["head.hidden.weight"], start.mean["head.hidden.weight"], rtol=0, atol=1e-3)
    assert "First weights: images-32" in (tmp_path / "run" / "summary.json").read_text()
    private = tmp_path / "run" / "model" / "posterior.safetensors"
    found = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "again"), "--start-from", str(private)])
    assert found.exit_code == 2
    assert "is not in this run's ledger" in found.output.replace("\n", " ")
    assert not (tmp_path / "again").exists()


def test_an_earlier_private_posterior_composes_to_the_stated_epsilon() -> None:
    """Two years of one model on the same people: the second leaves room for what the first released."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(4, 3), torch.randn(60, 4), torch.randint(0, 3, (60,))
    common = {"method": "dp-ivon-gradsq", "lr": 0.1, "batch_size": 20, "epochs": 2, "delta": 1e-3}
    first = dpivon.fit(model, x, y, target_epsilon=1.0, **common)
    history = [tuple(entry) for entry in first.account.history]
    second = dpivon.fit(first.model, x, y, prior=first.posterior, also=history, target_epsilon=2.0, **common)
    alone = dpivon.fit(first.model, x, y, prior=first.posterior, target_epsilon=2.0, **common)
    together = epsilon([*history, *second.account.history], 1e-3)
    assert 1.9 < together <= 2.0
    assert epsilon([*history, *alone.account.history], 1e-3) > 2.0
