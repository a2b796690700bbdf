"""The methods that the demonstration compares, and what was chosen for each of them.

Equal effort: three learning rates each, √10 apart, everything else at the library's defaults (but no weight decay for
DP-SGD and DP-Adam). The choice is the lowest negative log-likelihood on the *validation* split, averaged over the seeds 101,
102 and 103, at ε = 4, δ = 1e-4, 40 epochs, batch 256, C = 1 (``python -m dpivon.demo.tune``, one thread of an AMD EPYC, torch
2.13). Learning rate, NLL, accuracy:

    DP-SGD                 0.03  0.261 .918   0.1   0.280 .933   0.3   1.411 .802
    DP-Adam                0.003 0.353 .888   0.01  0.214 .933   0.03  0.838 .855
    DP-IVON-Gradsq         0.3   0.489 .833   1     0.243 .932   3     0.844 .825
    DP-AdamW               0.003 0.356 .888   0.01  0.212 .935   0.03  0.788 .852
    DP-RMSProp             0.001 0.864 .832   0.003 0.226 .930   0.01  0.267 .932
    DP-AdaGrad             0.03  0.263 .917   0.1   0.241 .923   0.3   1.834 .387
    DP-AdamBC              0.001 0.383 .880   0.003 0.164 .960   0.01  0.648 .870
    DP-IVON-Gradsq (plain) 0.3   0.489 .835   1     0.243 .933   3     0.806 .830
    DP-IVON (reparam)      0.3   0.489 .833   1     0.243 .932   3     0.828 .827
    DP-SGLD                0.3   0.420 .895   1     0.217 .945   3     0.560 .862
    DP-pSGLD               0.003 0.621 .867   0.01  0.189 .947   0.03  0.282 .930
    DP-BBP                 0.003 0.598 .822   0.01  0.258 .933   0.03  0.493 .883
    DP-MC-Dropout          0.003 0.532 .857   0.01  0.273 .932   0.03  0.470 .863

DPAGD with its defaults is DP-Adam, and IVON under privacy is DP-IVON (reparam). Methods with a posterior are averaged over
32 draws. DP-SGD's 0.1 was chosen earlier; by now 0.03 has the lower NLL and 0.1 the higher accuracy, and neither difference
is significant. SGD's momentum sums gradients where IVON's averages them, so their rates differ by a factor 10. ε, batch
size and epochs are the same for all; they were settled in a first look at the validation split, with two learning rates for
each of DP-SGD, DP-Adam and DP-IVON-Gradsq at ε = 4 and 8, and one at two other lengths or batch sizes.
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
    def private(self) -> bool:
        """Whether it is trained within the budget; the others are there to compare with, and have no ε."""
        return self.key.startswith("dp")

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
    "dp-adagrad": (0.03, 0.1, 0.3),
    "dp-adambc": (0.001, 0.003, 0.01),
    "dp-ivon-gradsq-plain": (0.3, 1.0, 3.0),
    "dp-ivon-reparam": (0.3, 1.0, 3.0),
    "ivon": (0.3, 1.0, 3.0),
    "dp-calm": (0.003, 0.01, 0.03),
    "dp-steady": (1.75, 3.5, 7.0),
    "dp-sgld": (0.3, 1.0, 3.0),
    "dp-psgld": (0.003, 0.01, 0.03),
    "dp-bbp": (0.003, 0.01, 0.03),
    "dp-mc-dropout": (0.003, 0.01, 0.03),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"weight_decay": 0.0},
    "dp-adam": {"weight_decay": 0.0},
}
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
