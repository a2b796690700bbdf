"""A run from a prior by the recipe (:mod:`dpivon.recipe`): one linear layer on what the prior's network sees.

The features are kept in the run's folder before its first release, and published with the model. To make them again would take
minutes, and other bits of them would be other data to a run that goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dpivon.durable.tensors import bytes_of
from dpivon.priors.features import CHUNK, Features
from dpivon.recipe import left_out
from dpivon.sources import Examples
from dpivon.train.config import Config
from dpivon.train.earlier import Earlier
from dpivon.train.published import FEATURES, Description, load_features

TOLD = 10.0  # seconds between two lines of progress


@dataclass(frozen=True, eq=False)
class LastLayer:
    """What such a run trains on.

    Attributes:
        features: what examples go through before the layer.
        held_out: which rows are not trained on, since the temperature is chosen on them; none, or about a public number.
    """

    features: Features
    held_out: Tensor

    @classmethod
    def of(cls, config: Config, description: Description, examples: Examples) -> LastLayer:
        """That of a run whose folder has its features, on examples as they were read."""
        assert examples.targets is not None
        share = config.temperature.held_out / config.dataset_size
        held_out = left_out(examples.inputs, examples.targets, share) if share else torch.zeros(len(examples)).bool()
        return cls(load_features(Path(config.out), description).to(config.device), held_out)

    def seen(self, examples: Examples, say: Callable[[str], None]) -> Examples:
        """The same examples as the layer takes them. What is said is tenths of them: how many there are is private."""
        made, at = torch.empty(len(examples), self.features.width), time.monotonic()
        for first in range(0, len(made), CHUNK):
            rows = slice(first, first + CHUNK)
            made[rows] = self.features(examples.inputs[rows])
            if time.monotonic() - at > TOLD and rows.stop < len(made):
                say(f"{10 * rows.stop // len(made)} tenths of these features are made.")
                at = time.monotonic()
        return replace(examples, inputs=made)

    def digest(self, examples: Examples) -> str:
        """Of the rows that are held out, of examples as the layer takes them."""
        assert examples.targets is not None
        found = hashlib.sha256()
        for rows in (examples.inputs, examples.targets):
            found.update(bytes_of(rows[self.held_out]))
        return found.hexdigest()


def new_features(
    config: Config, description: Description, earlier: Earlier | None, say: Callable[[str], None]
) -> Features | None:
    """Those of a run that is begun: of its prior, or of the earlier run; None where there are none, or its folder has them."""
    if not config.last_layer or (Path(config.out) / FEATURES).exists():
        return None
    if earlier is not None and earlier.published.features is not None:
        return earlier.published.features
    assert config.start_from is not None
    say(
        f"Flattening the features of {config.start_from} on images of its random process, which may take minutes on a CPU."
    )
    network = description.network.build().to(config.device)
    shape = description.inputs.shape  # of pixels that sources map to [−1, 1]
    return Features.of(network, config.start_from, shape, input_mean=0.5, input_std=0.5)
