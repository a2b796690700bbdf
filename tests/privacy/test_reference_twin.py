"""The library against the twin of the paper's algorithms, and ordinary optimizers against Opacus itself."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import opacus
import pytest
import torch
from opacus.optimizers import optimizer as opacus_optimizer
from reference_twin import (
    PRIVACY_SEED,
    SHORT,
    Run,
    Stream,
    StreamedNoise,
    assert_same,
    check_against_twin,
    library,
    loader_for,
    make_model,
    relative_error,
    twin,
)
from torch import nn

import dpivon

ACTIVE = Run()
INACTIVE = Run(clip=1e3, sigma=1e-3, decay=0.0)  # σC stays of the size of a gradient
DTYPES = [torch.float32, torch.float64]
MODELS = ["linear", "conv"]
MODES = ["bookkeeping", "alone"]


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_paper_where_clipping_is_active(model: str, mode: str, dtype: torch.dtype) -> None:
    theirs = check_against_twin(replace(ACTIVE, model=model, dtype=dtype), mode)
    assert theirs.clipped > 0.9 * theirs.examples


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_paper_where_nothing_is_clipped(model: str, mode: str, dtype: torch.dtype) -> None:
    theirs = check_against_twin(replace(INACTIVE, model=model, dtype=dtype), mode)
    assert theirs.clipped == 0
    assert theirs.examples > 200


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_paper_for_other_dampings(model: str, decay: float, dtype: torch.dtype) -> None:
    check_against_twin(replace(ACTIVE, model=model, dtype=dtype, decay=decay))


def test_the_comparison_notices_a_missing_correction() -> None:
    run = replace(ACTIVE, steps=SHORT)
    batches, ours = library(run)
    assert_same(ours, twin(run, batches), 1e-10)
    with pytest.raises(AssertionError, match="at step 0"):
        assert_same(ours, twin(replace(run, curvature="gradsq"), batches), 1e-5)
    with pytest.raises(AssertionError, match="means at step 0"):
        assert_same(ours, twin(replace(run, clip=run.clip * 1.001), batches), 1e-5)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("mode", "curvature"),
    [
        ("alone", "gradsq-corrected"),
        ("alone", "gradsq"),
        ("alone", "reparam"),
        ("bookkeeping", "gradsq"),
        ("bookkeeping", "reparam"),
        ("bookkeeping", "gradsq-corrected"),
    ],
)
def test_several_theta_samples_are_averaged_per_example_before_clipping(mode: str, curvature: str) -> None:
    check_against_twin(replace(ACTIVE, model="conv", samples=3, curvature=curvature, steps=SHORT), mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_reparameterised_estimator_reads_the_released_gradient(mode: str) -> None:
    check_against_twin(replace(ACTIVE, curvature="reparam", steps=SHORT), mode)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_augmentations_are_averaged_per_example_before_clipping(mode: str, samples: int) -> None:
    check_against_twin(replace(ACTIVE, model="conv", augmentations=3, samples=samples, steps=SHORT), mode)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(
    ("mode", "samples", "micro"),
    [
        ("alone", 1, 1),
        ("alone", 3, 2),
        ("bookkeeping", 1, 1),
        ("bookkeeping", 1, 2),
        ("bookkeeping", 3, 2),
        ("bookkeeping", 3, 1),
    ],
)
def test_micro_batches_change_nothing(mode: str, samples: int, micro: int) -> None:
    run = replace(ACTIVE, model="conv", samples=samples, curvature="reparam", steps=SHORT)
    whole_batches, whole = library(run, mode)
    split_batches, split = library(run, mode, micro)
    assert whole_batches == split_batches
    assert max(map(len, whole_batches)) > 2 * micro
    assert_same(split, whole, 1e-11)
    assert_same(split, twin(run, split_batches), 1e-10)


# ---- ordinary optimizers, against Opacus itself


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
}


@pytest.mark.campaign(keep=3)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus's own
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_at", [0.4, 1e3])
def test_ordinary_optimizers_equal_opacus_step_by_step(
    monkeypatch: pytest.MonkeyPatch, name: str, model_name: str, clip_at: float
) -> None:
    run = replace(ACTIVE, model=model_name, dtype=torch.float64, clip=clip_at, sigma=0.3 / clip_at)

    def private(engine: Any, **options: str) -> tuple[nn.Module, Any, Any]:
        model = make_model(run)
        return engine.make_private(
            module=model,
            optimizer=OPTIMIZERS[name](model.parameters()),
            data_loader=loader_for(run),
            noise_multiplier=run.sigma,
            max_grad_norm=run.clip,
            **options,
        )

    ours, our_optimizer, loader = private(dpivon.PrivacyEngine())
    our_optimizer.noise = StreamedNoise()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus on its own generator and on backward hooks
        theirs, their_optimizer, _ = private(opacus.PrivacyEngine(), grad_sample_mode="hooks")
    stream = Stream(PRIVACY_SEED)
    monkeypatch.setattr(opacus_optimizer, "_generate_noise", lambda std, reference, **_: std * stream(reference))
    steps = 0
    while steps < 20:
        for x, y, _ in loader:
            if len(y) == 0:
                continue  # Opacus is not asked to survive one here; the twin above is
            for model, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.flatten(0, 1)), y).backward()
                optimizer.step()
            assert relative_error(list(ours.parameters()), list(theirs.parameters())) <= 1e-10
            steps += 1
    start = list(make_model(run).parameters())
    assert relative_error(list(ours.parameters()), start) > 0.05  # it went somewhere
