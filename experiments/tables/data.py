"""The tables: scikit-learn's real ones and generated ones, scaled to [-1, 1] by declared ranges, as one .npz each.

python -m experiments.tables.data --out carry/tables
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

HELD = 4000  # rows of validation and of test, where they are generated


def _split(x, y, seed, train=None):
    """Training, validation and test rows: what is asked for and HELD each, or 60, 15 and 25 %."""
    order = np.random.default_rng(seed).permutation(len(x))
    a = round(0.6 * len(x)) if train is None else train
    b = a + (round(0.15 * len(x)) if train is None else HELD)
    parts = order[:a], order[a:b], order[b:]
    return {name: (x[rows], y[rows]) for name, rows in zip(("train", "validation", "test"), parts, strict=True)}


def _declared(x):
    """Ranges as an owner declares them: round numbers that hold every value, one significant digit outwards."""
    low, high = x.min(0), x.max(0)
    unit = 10.0 ** np.floor(np.log10(np.maximum(high - low, 1e-12)))
    low, high = np.floor(low / unit) * unit, np.ceil(high / unit) * unit
    return 2 * (x - low) / (high - low) - 1


def _real(name, seed):
    from sklearn import datasets

    if name == "diabetes":
        found = datasets.load_diabetes(scaled=False)
        return _split(_declared(found.data), (found.target > 140).astype(int), seed)
    found = {"cancer": datasets.load_breast_cancer, "wine": datasets.load_wine, "digits": datasets.load_digits}[name]()
    x = found.data / 8 - 1 if name == "digits" else _declared(found.data)
    return _split(x, found.target, seed)


def _four(x):
    """Normals, declared to lie within four standard deviations."""
    return np.clip(x / 4, -1, 1)


def _flip(score, rate, rng):
    """Labels of a logistic model whose positives are a share ``rate``."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-score - middle))).mean() < rate else (low, middle)
    return (rng.random(len(score)) < 1 / (1 + np.exp(-score - low))).astype(int)


def _generated(name, rng):
    n = {"imbalanced": 5000, "nonlinear": 60_000, "categories": 10_000, "missing": 4000, "small": 400, "large": 100_000}
    rows = n[name] + 2 * HELD
    if name == "imbalanced":  # patients: 12 correlated measurements, 15 % positives, overlapping classes
        x = rng.normal(size=(rows, 12)) @ (np.eye(12) + 0.3 * rng.normal(size=(12, 12)) / np.sqrt(12))
        score = x[:, :6] @ np.array([0.6, -0.5, 0.4, 0.3, -0.3, 0.2]) + 0.25 * x[:, 0] * x[:, 6]
        return _four(x), _flip(score, 0.15, rng), n[name]
    if name == "nonlinear":  # what a network of 2 x 8 hidden units says, with some noise
        x = rng.normal(size=(rows, 30))
        a, b = rng.normal(size=(30, 8)) / np.sqrt(10), rng.normal(size=8)
        score = np.tanh(2 * x @ a) @ b + 0.5 * x[:, 0] * x[:, 1]
        return _four(x), _flip(8 * score / score.std(), 0.5, rng), n[name]
    if name == "categories":  # four measurements and six categories of 3 to 20 levels, one column per level
        x = rng.normal(size=(rows, 4))
        score, columns = 0.8 * x[:, 0] - 0.5 * x[:, 1], [_four(x)]
        for levels in (3, 4, 5, 8, 12, 20):
            drawn = rng.choice(levels, rows, p=rng.dirichlet(np.full(levels, 3.0)))
            score = score + 0.7 * rng.normal(size=levels)[drawn]
            columns.append(np.eye(levels)[drawn])
        return np.concatenate(columns, 1), _flip(1.3 * score, 0.35, rng), n[name]
    if name == "missing":  # a fifth of the cells is missing: zero and an indicator; three classes
        x = rng.normal(size=(rows, 10))
        x[:, 5:] = 0.6 * x[:, :5] + 0.8 * x[:, 5:]
        y = np.argmax(x @ (0.9 * rng.normal(size=(10, 3))) + rng.gumbel(size=(rows, 3)), 1)
        gone = rng.random(x.shape) < 0.2
        return np.concatenate([np.where(gone, 0, _four(x)), gone], 1), y, n[name]
    if name == "small":
        x = rng.normal(size=(rows, 10))
        return _four(x), _flip(1.5 * x @ (rng.normal(size=10) / np.sqrt(3)), 0.4, rng), n[name]
    x = rng.normal(size=(rows, 12))
    score = x[:, 0] - x[:, 1] + 0.8 * np.abs(x[:, 2]) + 0.7 * x[:, 3] * x[:, 4]
    return _four(x), _flip(1.5 * score, 0.3, rng), n[name]


def _unseen(name, rng, seed):
    """Tables that no choice was made on: other generators, of the shapes that people have."""
    from sklearn.datasets import make_classification, make_friedman1

    n = UNSEEN[name]
    rows = n + 2 * HELD
    if name == "patients":  # lab values with long tails and yes/no findings, 15.7 % positives
        lab, found = rng.lognormal(0.0, 0.6, size=(rows, 8)), rng.random((rows, 6)) < rng.uniform(0.05, 0.5, 6)
        score = 0.9 * np.log(lab[:, 0]) + 0.5 * (lab[:, 1] > 1.5) - 0.3 * lab[:, 2] + found[:, :3] @ [0.6, 0.5, -0.4]
        return np.concatenate([np.clip(lab / 4 - 1, -1, 1), found], 1), _flip(score, 0.157, rng), n
    if name == "wide":
        known = {"n_informative": 12, "n_redundant": 6, "n_clusters_per_class": 3, "class_sep": 1.5, "flip_y": 0.02}
        x, y = make_classification(rows, 30, random_state=seed, **known)
        return _declared(x), y, n
    if name == "mixed":  # five measurements, the high ones missing more often, and four categories with rare levels
        x, columns, score = rng.exponential(size=(rows, 5)), [], 0.0
        for levels in (2, 4, 9, 15):
            shares = 1 / np.arange(1, 1 + levels)
            drawn = rng.choice(levels, rows, p=shares / shares.sum())
            score, columns = score + 0.8 * rng.normal(size=levels)[drawn], [*columns, np.eye(levels)[drawn]]
        score = score + 0.7 * x[:, 0] - 0.8 * np.minimum(x[:, 1], 1) + 0.4 * x[:, 2] * (x[:, 3] > 1)
        gone = rng.random(x.shape) < np.where(x > 1, 0.25, 0.1)
        return np.concatenate([np.where(gone, 0, _declared(x)), gone, *columns], 1), _flip(score, 0.3, rng), n
    x, score = make_friedman1(rows, n_features=10, noise=1.0, random_state=seed)
    return 2 * x - 1, (score > np.quantile(score, 0.6)).astype(int), n


UNSEEN = {"patients": 5000, "wide": 60_000, "mixed": 8000, "friedman": 20_000}
NAMES = ("imbalanced", "nonlinear", "cancer", "categories", "missing", "digits", "diabetes", "wine", "small", "large")


def make(name):
    if name in UNSEEN:
        seed = 2000 + list(UNSEEN).index(name)
        x, y, train = _unseen(name, np.random.default_rng(seed), seed)
        return _split(x, y, 11, train)
    rng = np.random.default_rng(1000 + NAMES.index(name))
    if name in ("cancer", "wine", "digits", "diabetes"):
        return _real(name, 7)
    x, y, train = _generated(name, rng)
    return _split(x, y, 7, train)


def load(folder, name):
    """{part: (x, y)} as tensors, and the number of classes."""
    import torch

    with np.load(Path(folder) / f"{name}.npz") as found:
        parts = {
            part: (
                torch.tensor(found[f"{part}_x"].astype(np.float32)),
                torch.tensor(found[f"{part}_y"].astype(np.int64)),
            )
            for part in ("train", "validation", "test")
        }
    return parts, int(max(int(y.max()) for _, y in parts.values())) + 1


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    out = arguments.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in (*NAMES, *UNSEEN):
        parts = make(name)
        arrays = {f"{part}_x": x.astype(np.float16) for part, (x, _) in parts.items()}
        arrays |= {f"{part}_y": y.astype(np.uint8) for part, (_, y) in parts.items()}
        np.savez_compressed(out / f"{name}.npz", **arrays)
        print(name, {part: x.shape for part, (x, _) in parts.items()}, np.bincount(parts["train"][1]))


if __name__ == "__main__":
    main()
