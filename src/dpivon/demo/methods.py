"""The methods that the demonstration compares, and what was chosen for each of them.

Equal effort: three learning rates each, √10 apart, everything else at the library's defaults. The choice is the
lowest negative log-likelihood on the *validation* split, averaged over the seeds 101, 102 and 103, at ε = 4, δ = 1e-4,
40 epochs, batch 256, C = 1 (``python -m dpivon.demo.tune``, one thread of an AMD EPYC, torch 2.13):

    DP-SGD          lr 0.03   NLL 0.294  accuracy .913     0.1   0.232  .927     0.3   1.647  .778
    DP-Adam         lr 0.003  NLL 0.392  accuracy .888     0.01  0.208  .945     0.03  0.746  .845
    DP-IVON-Gradsq  lr 0.3    NLL 0.531  accuracy .862     1     0.248  .928     3     0.592  .847

IVON's numbers are averages over 32 posterior samples, which is how it predicts; at the posterior mean its NLL is
0.479, 0.280 and 0.798. SGD's momentum sums gradients where IVON's averages them, so their rates differ by a factor 10.
ε, batch size and epochs are the same for all; they were settled in a first look at the validation split, with two
learning rates for each method at ε = 4 and 8, and one at two other lengths or batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpivon.errors import bad
from dpivon.methods import describe

EPSILON, DELTA, EPOCHS = 4.0, 1e-4, 40  # what the learning rates were chosen at


@dataclass(frozen=True)
class Entry:
    """A method of the registry with the learning rate and options it has in the demonstration."""

    key: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return describe(self.key).title

    @property
    def samples(self) -> int:
        """How many draws its prediction averages; 0 for a point estimate."""
        return describe(self.key).samples


#: Three learning rates each, √10 apart.
CANDIDATES = {
    "dp-sgd": (0.03, 0.1, 0.3),
    "dp-adam": (0.003, 0.01, 0.03),
    "dp-ivon-gradsq": (0.3, 1.0, 3.0),
    "dp-adamw": (0.003, 0.01, 0.03),
    "dpagd": (0.003, 0.01, 0.03),
    "dp-rmsprop": (0.001, 0.003, 0.01),
    "dp-adagrad": (0.01, 0.03, 0.1),
    "dp-adambc": (0.001, 0.003, 0.01),
    "dp-ivon-gradsq-plain": (0.3, 1.0, 3.0),
    "dp-ivon-reparam": (0.3, 1.0, 3.0),
    "ivon": (0.3, 1.0, 3.0),
}
_OPTIONS: dict[str, dict[str, Any]] = {"dp-sgd": {"weight_decay": 0.0}, "dp-adam": {"weight_decay": 0.0}}
ENTRIES = {key: Entry(key, candidates[1], _OPTIONS.get(key, {})) for key, candidates in CANDIDATES.items()}
#: What is compared unless somebody asks for others.
METHODS = tuple(ENTRIES[key] for key in ("dp-sgd", "dp-adam", "dp-ivon-gradsq"))


def chosen(names: Sequence[str]) -> tuple[Entry, ...]:
    """The entries of these names, in their order; the three of the paper if there are none."""
    if not names:
        return METHODS
    for name in names:
        describe(name)
    if len(set(names)) < len(names):
        raise bad("method", list(names), "names one twice", "Name each once")
    return tuple(ENTRIES[name] for name in names)
