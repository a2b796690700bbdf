"""What is outside the library: private logistic regression by objective perturbation (diffprivlib) and two without privacy.

diffprivlib 0.6.6 needs scikit-learn before 1.6, so it has an environment of its own:

    python -m venv .venv-tables && .venv-tables/bin/pip install diffprivlib "scikit-learn<1.6"
    .venv-tables/bin/python -m experiments.tables.references --data carry/tables
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np

OUT = Path(__file__).parent / "results" / "references.csv"
NAMES = ("imbalanced", "nonlinear", "cancer", "categories", "missing", "digits", "diabetes", "wine", "small", "large")
EPSILONS, SEEDS = (0.5, 1.0, 3.0, 8.0), 5
STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0)  # inverse regularisation, chosen on validation data


def scores(probs, y, prior):
    """As ``experiments.tables.train.scores``."""
    from sklearn.metrics import roc_auc_score

    probs = np.clip(np.where(np.isfinite(probs).all(1, keepdims=True), probs, 1.0), 1e-12, 1)
    probs = probs / probs.sum(1, keepdims=True)
    even = probs / prior
    even = even / even.sum(1, keepdims=True)
    classes = range(probs.shape[1])
    areas = [roc_auc_score(y == c, even[:, c]) for c in (classes if len(classes) > 2 else (1,))]
    wrong = -np.log(even[np.arange(len(y)), y])
    return {
        "accuracy": (probs.argmax(1) == y).mean(),
        "nll": -np.log(probs[np.arange(len(y)), y]).mean(),
        "balanced_nll": np.mean([wrong[y == c].mean() for c in classes]),
        "auc": np.mean(areas),
        "balanced_accuracy": np.mean([(even.argmax(1)[y == c] == c).mean() for c in classes]),
    }


def made(method):
    """By what a row was made; this environment has no torch."""
    package = "diffprivlib" if method == "dp-logistic" else "scikit-learn"
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=OUT.parents[1], check=False).stdout.strip()
    return {"device": "CPU", "software": f"{package} {version(package)}", "commit": commit or "unknown"}


def table(name, folder):
    """The rows of one table."""
    from diffprivlib.models import LogisticRegression as Private
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    found, rows = np.load(folder / f"{name}.npz"), []
    parts = {p: (found[f"{p}_x"].astype(float), found[f"{p}_y"].astype(int)) for p in ("train", "validation", "test")}
    x, y = parts["train"]
    prior = np.bincount(np.concatenate([part[1] for part in parts.values()])).astype(float)
    prior /= prior.sum()
    norm = np.sqrt(10.0 if name == "categories" else x.shape[1])  # of any row, from the declared ranges

    def score(model, part):
        features, labels = parts[part]
        return scores(model.predict_proba(features), labels, prior)

    def keep(method, epsilon, seed, model, **chosen):
        own = {"table": name, "method": method, "epsilon": epsilon, "seed": seed, **chosen, **made(method)}
        rows.append(own | {f"test_{k}": round(float(v), 5) for k, v in score(model, "test").items()})

    def private(epsilon, strength, seed):
        known = {"epsilon": epsilon, "C": strength, "random_state": seed}
        return Private(data_norm=norm, max_iter=500, **known).fit(x, y)

    public = [LogisticRegression(C=c, max_iter=2000).fit(x, y) for c in (0.1, 1.0, 10.0, 100.0)]
    keep("logistic", "", 0, min(public, key=lambda m: score(m, "validation")["balanced_nll"]))
    some = {"max_iter": 200, "early_stopping": True, "random_state": 0, "learning_rate": 0.05}
    keep("boosting", "", 0, HistGradientBoostingClassifier(**some).fit(x, y))
    for epsilon in EPSILONS:
        tried = []
        for c in STRENGTHS:
            losses = [score(private(epsilon, c, 100 + s), "validation")["balanced_nll"] for s in (0, 1)]
            tried.append((np.mean(losses), c))
        best = min(tried)[1]
        for seed in range(SEEDS):
            keep("dp-logistic", epsilon, seed, private(epsilon, best, seed), strength=best)
    return rows


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, default=Path("carry/tables"))
    folder = arguments.parse_args().data
    warnings.simplefilter("ignore")
    rows = [row for name in NAMES for row in table(name, folder)]
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("w", newline="") as file:
        names = ["table", "method", "epsilon", "seed", "strength", *(k for k in rows[0] if k.startswith("test_"))]
        names += ["device", "software", "commit"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
