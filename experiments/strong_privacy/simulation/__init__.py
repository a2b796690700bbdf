"""Which curvature can be estimated under privacy, and what it is worth: a simulation on the digits, on one CPU thread.

    python -m experiments.strong_privacy.simulation                # both parts, about six minutes; simulation.*
    python -m experiments.strong_privacy.simulation --part truth   # the estimators against the truth alone

Truth: softmax regression (650 weights) held where some epochs of training left it, so that every example's clipped gradient is
known. Releases are drawn as a private run would (Poisson batches, noise for the stated ε), the estimators read nothing else,
and are compared with v = ḡ² + (1 − q) F/b, which squares of gradients estimate, with ḡ² and with the diagonal Fisher F.

Training: an MLP of 2,410 weights, every method at every ε with three learning rates √10 apart and three seeds, averaged
iterates; the validation digits choose the learning rate, one for all ε or one for each. No test digit is read.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import dpivon

OUT = Path(__file__).parents[1] / "results"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA, EPOCHS, BATCH, BOUND, EMA, SEEDS, DRAWS = 1e-4, 20, 256, 1.0, 0.95, 3, 16
RHO = 0.99


@cache
def noise(n, epsilon):
    """σ for ε."""
    facts = {"dataset_size": n, "batch_size": BATCH, "epochs": EPOCHS, "delta": DELTA, "accountant": "rdp"}
    return dpivon.budget(target_epsilon=epsilon, **facts).noise_multiplier


def report(out):
    """The page and the figure again, from the runs in ``out``."""
    from experiments.strong_privacy.simulation.page import figure, tables

    result = json.loads((out / "simulation.json").read_text())
    (out / "simulation.md").write_text(tables(result))
    figure(result, out / "simulation.png")
    return [out / "simulation.md", out / "simulation.png"]
