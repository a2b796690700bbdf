"""The registry: complete descriptions, defaults that are the optimizers' own, and errors that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dpivon
from dpivon.methods import METHODS, describe
from dpivon.methods.base import options_of
from dpivon.optim import IVON, RuleOptimizer
from dpivon.optim.curvature import ESTIMATORS
from dpivon.optim.point import Moment
from dpivon.stacked.run import estimator_of


@pytest.mark.parametrize("name", METHODS)
def test_every_method_describes_itself(name: str) -> None:
    m = describe(name)
    assert m.name == name == name.lower()
    texts = (m.title, m.summary, m.optimises, m.posterior, m.predicts, m.choose, m.reference)
    assert all(text and "\n" not in text for text in texts)
    assert m.lr > 0


def test_names_and_titles_are_unique() -> None:
    assert len({m.title for m in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_options_reach_the_optimizer(name: str) -> None:
    decay = {"weight_decay": 0.125} if "weight_decay" in describe(name).defaults else {}
    learner = dpivon.method(name, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), dataset_size=77, lr=0.25, **decay)
    for group in learner.optimizer.param_groups:
        assert group["lr"] == 0.25
        assert group.get("weight_decay") == decay.get("weight_decay", group.get("weight_decay"))
        if "ess" in group:
            assert group["ess"] == 77


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_those_of_the_rule(name: str) -> None:
    learner = dpivon.method(name, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), dataset_size=10)
    if type(learner.optimizer) is RuleOptimizer and name != "dpagd":
        assert learner.method.defaults == options_of(learner.optimizer.rule)
    for group in learner.optimizer.param_groups:
        for key, value in learner.method.defaults.items():
            if key in group and value is not None:
                assert group[key] == value, key


def test_ivon_methods_differ_in_their_curvature() -> None:
    chosen = {
        name: dpivon.method(name, nn.Linear(2, 2), dataset_size=5).optimizer.curvature.name
        for name in METHODS
        if "ivon" in name
    }
    assert chosen == {
        "dp-ivon-gradsq": "gradsq-corrected",
        "dp-ivon-gradsq-plain": "gradsq",
        "dp-ivon-reparam": "reparam",
        "ivon": "reparam",
    }


@pytest.mark.parametrize(("name", "curvature"), [("dp-calm", "empirical-bayes-fisher"), ("dp-steady", "whole-fisher")])
def test_a_default_estimator_is_one_and_the_same_everywhere(name: str, curvature: str) -> None:
    built: Any = dpivon.method(name, nn.Linear(2, 2), dataset_size=5).optimizer
    stacked = estimator_of(name)
    assert stacked is not None
    assert curvature == built.rule.estimator.name == stacked.name == METHODS[name].defaults["curvature"]


@pytest.mark.parametrize("curvature", ESTIMATORS)
def test_any_estimator_can_be_named(curvature: str) -> None:
    """By name, and it reports that name; the calm step divides by a second moment, so it takes those that are one."""
    optimizer = dpivon.method("dp-ivon-gradsq", nn.Linear(2, 2), dataset_size=5, curvature=curvature).optimizer
    assert isinstance(optimizer, IVON)
    assert optimizer.curvature.name == curvature
    if "reparam" in curvature or "gradsq" in curvature:
        with pytest.raises(ValueError, match=f"curvature='{curvature}': does not estimate a second moment"):
            dpivon.method("dp-calm", nn.Linear(2, 2), dataset_size=5, curvature=curvature)
    else:
        q = dpivon.method("dp-calm", nn.Linear(2, 2), dataset_size=5, curvature=curvature).posterior()
        assert q.metadata["curvature"] == curvature


@pytest.mark.parametrize("wrong", [3, None, "none such", Moment])
def test_what_is_no_moment_is_refused(wrong: Any) -> None:
    with pytest.raises(dpivon.ArgumentError, match=r"phi=.*Use one of 'gradient'"):
        dpivon.method("dpagd", nn.Linear(2, 2), dataset_size=5, phi=wrong)


def test_dpagd_takes_any_phi_and_psi() -> None:
    learner = dpivon.method("dpagd", nn.Linear(2, 2), dataset_size=5, phi="gradient", psi="square-sum", cap=2.0)
    assert isinstance(learner.optimizer, RuleOptimizer)
    assert learner.optimizer.rule.defaults.keys() == {"nu", "cap", "weight_decay"}
    assert learner.optimizer.param_groups[0]["cap"] == 2.0
    with pytest.raises(ValueError, match="psi='cube': is not known"):
        dpivon.method("dpagd", nn.Linear(2, 2), dataset_size=5, psi="cube")
    with pytest.raises(ValueError, match=r"momentum=0\.5: is not an option"):
        dpivon.method("dpagd", nn.Linear(2, 2), dataset_size=5, momentum=0.5)  # φ = average has none


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dp-sdg", {}, "name='dp-sdg': is not a known method"),
        ("dp-sgd", {"beta1": 0.9}, "beta1=0.9: is not an option of 'dp-sgd'"),
        ("dp-sgd", {"lr": -1}, "lr=-1"),
        ("dp-sgd", {"ema": 2.0}, "ema=2.0"),
        ("dp-sgd", {"dataset_size": 0}, "dataset_size=0"),
    ],
)
def test_bad_input_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpivon.method(name, nn.Linear(2, 2), **{"dataset_size": 5, **options})


def test_sample_needs_the_private_optimizer_where_there_is_one() -> None:
    model = nn.Linear(2, 2)
    learner = dpivon.method("dp-ivon-gradsq", model, dataset_size=4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)), batch_size=2)
    dpivon.PrivacyEngine().make_private(
        module=model, optimizer=learner.optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert isinstance(learner.optimizer, IVON)
    with pytest.raises(dpivon.PrivacyError, match=r"learner\.make_private"), learner.sample():
        pass
