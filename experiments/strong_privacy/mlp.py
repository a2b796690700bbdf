"""The MLP of the simulations: all runs of a stack computed at once, and what their predictions are worth."""

from __future__ import annotations

import math

import torch
from torch import nn

from dpivon import metrics
from dpivon.stacked import AnyNetwork


def build(inputs=64, hidden=32):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def layers(theta, x):
    """Hidden units, the second layer's weights and the logits of K MLPs, [K, P], on inputs [K, n, d]."""
    w1, b1, w2, b2 = split(theta, x.shape[-1])
    hidden = (x @ w1.mT + b1).tanh()
    return hidden, w2, hidden @ w2.mT + b2


def split(theta, d):
    """Weights and biases of both layers, from rows [K, P]."""
    h = (theta.shape[1] - 10) // (d + 11)
    shapes = [(h, d), (1, h), (10, h), (1, 10)]
    parts = theta.split([rows * columns for rows, columns in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def columns(scale):
    """Of K matrices D = rows ⊗ columns, the columns' part; the rows' is their first column."""
    return scale[:, :1] / scale[:, :1, :1]


class BatchedMLP(AnyNetwork):
    """The MLP with all runs of a stack computed at once; the ordinary loop costs many times as much here."""

    def __init__(self, inputs=64, hidden=32):
        super().__init__(lambda: build(inputs, hidden))

    def gradients(self, runs, capacity, device, dtype):
        return BatchedSums()


class BatchedSums:
    """Σ clipped gradients of K MLPs. A linear layer's example has ‖g‖² = (‖a‖² + 1) ‖d‖², d the gradient of its output."""

    def prepare(self, inputs):
        return inputs.flatten(1)

    def clipped_sums(self, theta, batch, bound):
        k = len(theta)
        spare = batch.places >= len(batch.labels)
        rows = batch.places.clamp(max=len(batch.labels) - 1)
        x, y = batch.inputs.flatten(1)[rows], batch.labels[rows]
        hidden, w2, logits = layers(theta, x)
        d2 = logits.softmax(-1) - nn.functional.one_hot(y, 10)
        d1 = (d2 @ w2) * (1 - hidden.square())
        biases = [d1, d2]
        inputs, outputs = (x, hidden), (d1, d2)
        squares = [
            a.square().sum(-1) * d.square().sum(-1) + e.square().sum(-1)
            for a, d, e in zip(inputs, outputs, biases, strict=True)
        ]
        factor = ((bound.view(k, 1) / (squares[0] + squares[1]).sqrt()).clamp(max=1.0) * ~spare).unsqueeze(-1)
        sums = [
            s
            for a, d, e in zip(inputs, outputs, biases, strict=True)
            for s in ((d * factor).mT @ a, (e * factor).sum(1))
        ]
        return torch.cat([s.flatten(1) for s in sums], 1).double()


def graded(probs, y):
    """Accuracy, NLL and ECE; NaN where the run has diverged."""
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(("accuracy", "nll", "ece"), math.nan)
    right = float((probs.argmax(-1) == y).double().mean())
    return {"accuracy": right, "nll": metrics.nll(probs, y), "ece": metrics.ece(probs, y)}
