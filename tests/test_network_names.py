"""Networks by name and by import path."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from dpivon.errors import ArgumentError
from dpivon.models import NETWORKS, check_network, network


@pytest.mark.parametrize("name", NETWORKS)
def test_every_name_builds_a_network_for_the_shape(name: str) -> None:
    shape = (12,) if name in ("mlp", "table", "ordinal", "text") else (3, 16, 16)
    x = torch.zeros(2, 12, dtype=torch.long) if name == "text" else torch.zeros(2, *shape)
    assert network(name, shape=shape, classes=4)(x).shape == (2, 4)


def test_arguments_reach_the_network() -> None:
    assert network("mlp", shape=(5,), classes=2, hidden=(7,)).layers.hidden1.out_features == 7
    assert network("torch.nn:Linear", in_features=3, out_features=2).weight.shape == (2, 3)


def test_a_factory_gets_the_public_shape_if_it_has_a_parameter_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("own_networks")
    own.made = lambda shape, width=1: nn.Linear(shape[0], width)
    own.number = 3
    own.wrong = lambda: 3
    monkeypatch.setitem(sys.modules, "own_networks", own)
    assert network("own_networks:made", shape=(4,), classes=2, width=5).weight.shape == (5, 4)
    for name, problem in (
        ("own_networks:made", "cannot be called with"),
        ("own_networks:number", "is a int"),
        ("own_networks:wrong", "returned a int"),
        ("own_networks:absent", "could not be imported"),
        ("no_such_package.module:factory", "could not be imported"),
    ):
        with pytest.raises(ArgumentError, match=f"network='{name}': {problem}"):
            network(name)


@pytest.mark.parametrize("name", ["paper-cnn", "os.system", "a:b:c", "a b:c", ":c", "a:", "", 3])
def test_what_is_no_network_is_refused_before_anything_is_imported(name: object) -> None:
    with pytest.raises(ArgumentError, match=r"is not a known network\. Use one of mlp"):
        check_network(name)  # type: ignore[arg-type]


def test_images_are_needed_by_a_convolution() -> None:
    with pytest.raises(ArgumentError, match="square images, not examples of shape 3 × 8 × 9"):
        network("paper", shape=(3, 8, 9), classes=2)
