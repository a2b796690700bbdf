"""Made-up results of a comparison, in folders: whose scores each test bends."""

from __future__ import annotations

from dpivon.study.plan.plan import Plan, PlannedRun, changed
from dpivon.study.results import table

SIGMAS = {11.5: (0.991, 0.999), 4.3: (2.993, 2.997), 2.05: (7.491, 7.493)}  # ε of training, and with a temperature
RATES = {"dp-sgd": (0.3, 1.0, 3.0), "dp-adam": (0.001, 0.003, 0.01), "dp-steady": (2.5, 3.5, 10.0)}
CHOSEN = {"dp-sgd": 1.0, "dp-adam": 0.003, "dp-steady": 10.0}
DEFAULT = 3.5
JITTER = (-0.004, -0.001, 0.0, 0.002, 0.003)  # of accuracy, by repetition


def row(method, sigma, seed, lr, scores, *, b=4096, c=1.0, epochs=90, epsilon=None, **changes):
    """``scores`` has accuracy, nll and ece; a posterior's averages and the temperature follow from them."""
    options = changes.pop("options", "")
    run = PlannedRun(method, b, sigma, c, seed, lr)
    spent = epsilon or SIGMAS[sigma]
    out = dict.fromkeys(table.COLUMNS) | {"id": run.id + options, "method": method, "batch_size": b}
    out |= {"noise_multiplier": sigma, "max_grad_norm": c, "seed": seed, "lr": lr, "options": options, "epochs": epochs}
    out |= {"epsilon": spent[0], "epsilon_tempered": spent[1], "delta": 1e-5, "temperature": 1.5, **scores}
    out |= {f"tempered_{k}": v for k, v in scores.items()}
    if method == "dp-steady":
        out |= {f"mc_{k}": v for k, v in scores.items()}
    out |= {"train_size": 50_000, "dataset": "cifar10", "network": "paper", "split": "final", "releases": 1170}
    out |= {"hardware": "made up", "torch": "2", "version": "0", "seconds": 1.0}
    return out | changes


def plain(method, sigma, lr):
    """Better with ε; DP-Adam a point above DP-SGD, the recipe half a point above that whatever its rate."""
    level = {11.5: 0.45, 4.3: 0.55, 2.05: 0.62}[sigma]
    accuracy = level + {"dp-sgd": 0.0, "dp-adam": 0.01, "dp-steady": 0.015}[method]
    return {"accuracy": accuracy, "nll": 2.2 - 1.5 * accuracy, "ece": 0.02}


def final(scores=plain, *, seeds=5, rates=CHOSEN, spread=1.0, **changes):
    """Rows of a final study: the chosen rates, and the default of ours beside its own."""
    out = []
    for sigma in SIGMAS:
        for method, lr in [*rates.items(), *([("dp-steady", DEFAULT)] if "dp-steady" in rates else [])]:
            for seed in range(seeds):
                found = dict(scores(method, sigma, lr))
                found["accuracy"] += spread * JITTER[seed] * (1 if method == "dp-sgd" else 0.5)
                out.append(row(method, sigma, seed, lr, found, **changes))
    return out


def tuning(accuracy=lambda method, sigma, lr: 0.5 + 0.01 * (CHOSEN[method] == lr), **changes):
    """Rows of a tuning study: three rates a method and cell; ``accuracy`` is on validation data."""
    out = []
    for sigma in SIGMAS:
        for method, rates in RATES.items():
            for lr in rates:
                found = {"accuracy": accuracy(method, sigma, lr), "nll": 1.5, "ece": 0.02}
                out.append(row(method, sigma, 0, lr, found, split="tuning", train_size=45_000, **changes))
    return out


def folder(path, rows, name="runs.csv", plan=True):
    """A folder as a study leaves it; its plan has every run of the rows."""
    path.mkdir(parents=True, exist_ok=True)
    table.write(path / name, rows)
    if plan and name == "runs.csv":
        planned(rows).write(path / "study.json")
    return path


def planned(rows):
    import json

    first = rows[0]
    runs = [
        PlannedRun(
            r["method"], r["batch_size"], r["noise_multiplier"], r["max_grad_norm"], r["seed"], r["lr"],
            json.loads(r["options"]) if r["options"] else {},
        )
        for r in rows
    ]  # fmt: skip
    assert all(changed(run.options) == r["options"] for run, r in zip(runs, rows, strict=True))
    shape = (first["dataset"], first["network"], "final", first["epochs"], first["delta"])
    return Plan("made-up", *shape, 16, 0, tuple(runs))
