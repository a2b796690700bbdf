"""A made-up table of the paper's grid, whose shape each test bends."""

from __future__ import annotations

import math

from dpivon.study.plan.plan import PlannedRun
from dpivon.study.results import table

IVON = "dp-ivon-gradsq"
METHODS = ("dp-sgd", "dp-adam", IVON)
BATCHES, SIGMAS, NORMS = (128, 256, 512), (0.1, 1.0, 5.0, 10.0, 15.0), (10.0, 20.0)


def paper_like(method, b, sigma, c):
    """(accuracy, nll, ece) as the paper's sentences have it: IVON ahead at weak privacy, behind at strong."""
    pain = math.log10(1 + 50 * sigma * c / b)
    if method == IVON:
        accuracy = max(0.1, 0.75 - (0.15 if sigma <= 2 else 0.30) * pain)
        return accuracy, 0.9 + pain**3, 0.02 + (0.005 * pain if sigma <= 2 else 0.2 * pain)
    shift = 0.01 if method == "dp-adam" else 0.0
    return 0.74 - 0.15 * pain - shift, 1.0 + 0.5 * pain + shift, 0.06 + 0.03 * pain + shift


def rows(scores=paper_like, *, seeds=3, h_end=0.5, share_end=0.69, **changes):
    out, diagnostics = [], []
    for method in METHODS:
        for b in BATCHES:
            for sigma in SIGMAS:
                for c in NORMS:
                    for seed in range(seeds):
                        run = PlannedRun(method, b, sigma, c, seed, 0.1)
                        accuracy, nll, ece = scores(method, b, sigma, c)
                        jitter = 0.002 * (seed - 1)
                        row = dict.fromkeys(table.COLUMNS)
                        row |= {"id": run.id, "method": method, "batch_size": b, "noise_multiplier": sigma}
                        row |= {"max_grad_norm": c, "seed": seed, "lr": 0.1, "options": "", "epochs": 150}
                        row |= {"epsilon": 3 * b / 128 / sigma**1.5, "delta": 1e-5, "accuracy": accuracy + jitter}
                        row |= {"nll": nll + jitter, "ece": ece, "brier": 0.5, "steps": 100, "releases": 100}
                        row |= {
                            "train_size": 50_000,
                            "seconds": 10.0 + METHODS.index(method),
                            "stack_size": 30,
                            "stack_methods": 1,
                        }
                        if method == IVON:
                            row |= {f"mc_{k}": row[k] for k in table.SCORES} | {"mc_samples": 8}
                            row |= {"projected_share": share_end, "h_q05": h_end, "h_median": h_end, "h_q95": h_end}
                            row |= {"std_q05": 0.004, "std_median": 0.005, "std_q95": 0.006}
                            for k, step in enumerate((1, 10, 100)):
                                at = {"id": run.id, "step": step, "epoch": 1.5 * step}
                                h, share = 1 + (h_end - 1) * k / 2, 0.4 + (share_end - 0.4) * k / 2
                                at |= {"projected_share": share, "h_q05": h, "h_median": h, "h_q95": h}
                                diagnostics.append(at | {"std_q05": 0.004, "std_median": 0.005, "std_q95": 0.006})
                        out.append(row | changes)
    return out, diagnostics


def tuned(accuracy):
    """Tuning rows: two rates a method at two σ; ``accuracy`` maps (method, lr, σ) to a number."""
    out = []
    for method in ("dp-sgd", IVON):
        for lr in (0.1, 1.0):
            for sigma in (1.0, 5.0):
                run = PlannedRun(method, 512, sigma, 10.0, 0, lr)
                row = dict.fromkeys(table.COLUMNS) | {"id": run.id, "method": method, "lr": lr, "options": ""}
                row |= {"batch_size": 512, "noise_multiplier": sigma, "max_grad_norm": 10.0, "seed": 0, "delta": 1e-5}
                row |= {"accuracy": accuracy(method, lr, sigma), "nll": 1.0, "releases": 50, "train_size": 45_000}
                out.append(row)
    return out


def two_cells(out):
    """Two cells of a table on disk in ``out``, as a GPU machine leaves it: without PLD."""
    out.mkdir()
    made, diagnostics = rows(seeds=2)
    keep = [r for r in made if r["batch_size"] == 512 and r["noise_multiplier"] in (1.0, 5.0)]
    table.write(out / "runs.csv", keep)
    ids = {r["id"] for r in keep}
    table.write(out / "diagnostics.csv", [d for d in diagnostics if d["id"] in ids], table.DIAGNOSTIC_COLUMNS)
    return out
