"""What a table gets where its owner says nothing: a rule of public numbers, the examples N and the budget ε.

It was chosen on ten tables (``experiments/tables``) and reads no row. N·ε is what decides: it is how far the signal stands
above the noise.

- **Network** (``table``, :class:`dpivon.models.TableMLP`). One hidden layer from N·min(ε, 2) = 30,000 on, below it a linear
  classifier: beyond ε = 2 it is the rows that are few, and no longer the noise that is strong.
- **Method.** :data:`METHOD`, whose step is in units of the weights and whose result is the average of the last iterates.
- **C** is near the norm of a linear classifier's gradients there, and grows with N·ε: noise is what a large C costs.
- **Batches** are large and steps few: at a fixed ε the noise of T steps depends on T and hardly on b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpivon.errors import check_number, check_whole

#: The method of every door where none is named: one rate serves every ε (docs/methods.md has the measurements).
METHOD = "dp-steady"
#: Of a method's step size where a number is predicted: residuals do not saturate as probabilities do.
OF_NUMBERS = 0.3
#: dp-steady's where all weights begin at a prior of this name, as validation images chose it; of others half the usual one.
FROM_PRIOR = {"images-32": 1.75, "strokes-8": 0.45}

NETWORK_FROM, LARGE_EPSILON = 30_000, 2.0  # N·ε, and the ε beyond which more of it does not stand for more rows
COUNTED_FROM = 1000  # N·ε per class, from which on counting the classes costs little and says much
HIDDEN = (64,)


@dataclass(frozen=True)
class TableDefaults:
    """One run on a table.

    Attributes:
        method: a name of ``dpivon methods``.
        network: a name of :data:`dpivon.models.NETWORKS`.
        hidden: widths of the hidden layers; () is a linear classifier.
        max_grad_norm: C.
        lr: the step size.
        batch_size: the expected batch b.
        epochs: passes of ⌈N/b⌉ steps each.
    """

    method: str
    network: str
    hidden: tuple[int, ...]
    max_grad_norm: float
    lr: float
    batch_size: int
    epochs: int


def table_defaults(dataset_size: int, epsilon: float, batch_size: int | None = None) -> TableDefaults:
    """The run that a table of N examples gets at this ε; in as many steps where another batch is given.

    >>> table_defaults(5000, epsilon=1.0).hidden
    ()
    """
    n = check_whole("dataset_size", dataset_size, "Use the public number of examples", at_least=1)
    worth = n * check_number("epsilon", epsilon, "Use a value such as 3.0", above=0.0)
    excess = math.sqrt(n * min(epsilon, LARGE_EPSILON) / NETWORK_FROM)
    network = excess >= 1
    batch = min(n, check_whole("batch_size", batch_size or 2048, "Use the expected batch", at_least=1))
    steps = min(400 * excess, 1600) if network else 100
    return TableDefaults(
        method=METHOD,
        network="table",
        hidden=HIDDEN if network else (),
        max_grad_norm=round(2 * min(max(worth / 1000, 1.0), 125.0) ** (1 / 3), 2),
        lr=round(min(2 * excess, 3.5) if network else min(max(2 * (1000 / worth) ** 0.25, 1.0), 2.0), 2),
        batch_size=batch,
        epochs=max(1, round(steps / math.ceil(n / batch))),
    )
