"""Many private runs on one table at once: the library's update rules on rows of parameters, clipped sums in closed form.

All runs of a call share their Poisson batches, which costs none of them its guarantee; noise is each one's own.
``tests/experiments/test_tables.py`` holds the sums to the library's book-keeping and a step to its ``Stack``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpivon.optim.average import window_decay
from dpivon.optim.steady import weight_scale
from dpivon.stacked.run import FILLED, Rows, defaults_of, rule_of

HIDDEN = 64
BLOCKS = 2  # of a residual network
CACHED = 2**17  # numbers per activation tensor, so that they stay near the core


class Spec(NamedTuple):
    """One run: what it is besides the table, ε, the network, b, T and the seed."""

    method: str
    lr: float
    bound: float


class Net(NamedTuple):
    """A linear classifier, or one hidden layer of tanh, on inputs times a public constant."""

    features: int
    classes: int
    hidden: int
    scale: float

    @property
    def shapes(self):
        if not self.hidden:
            return [(self.classes, self.features), (self.classes,)]
        return [(self.hidden, self.features), (self.hidden,), (self.classes, self.hidden), (self.classes,)]

    @property
    def matrices(self):
        return [s if len(s) == 2 else (s[0], 1) for s in self.shapes]

    def parts(self, theta):
        """[K, P] → one tensor per parameter, each [K, …]."""
        sizes = [math.prod(s) for s in self.shapes]
        return [t.reshape(len(theta), *s) for t, s in zip(theta.split(sizes, 1), self.shapes, strict=True)]

    def module(self):
        layers = [nn.Linear(self.features, self.hidden), nn.Tanh()] if self.hidden else []
        return nn.Sequential(*layers, nn.Linear(self.hidden or self.features, self.classes))

    def start(self, seed):
        """Zeros for the linear classifier, torch's own weights for the other."""
        if not self.hidden:
            return torch.zeros(sum(math.prod(s) for s in self.shapes))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.utils.parameters_to_vector(self.module().parameters()).detach()

    def forward(self, theta, x):
        """Hidden activations [K, n, h] (or None) and logits [K, n, classes] for inputs [n, features]."""
        if not self.hidden:
            w, b = self.parts(theta)
            return None, (x @ w.flatten(0, 1).T).view(len(x), *w.shape[:2]).transpose(0, 1) + b.unsqueeze(1)
        w, b, w2, b2 = self.parts(theta)
        hidden = ((x @ w.flatten(0, 1).T).view(len(x), *w.shape[:2]).transpose(0, 1) + b.unsqueeze(1)).tanh()
        return hidden, hidden @ w2.mT + b2.unsqueeze(1)

    def clipped_sums(self, theta: Tensor, x: Tensor, y: Tensor, bound: Tensor) -> Tensor:
        """Σ min(1, C/‖g‖) g of K models, [K, P]. A linear layer's example has ‖g‖² = (‖a‖² + 1) ‖d‖²."""
        at_once = max(32, CACHED // (len(theta) * (self.hidden or self.classes)))
        both = zip(x.split(at_once), y.split(at_once), strict=True)
        return sum((self._sums(theta, *some, bound) for some in both), torch.zeros_like(theta))

    def _sums(self, theta, x, y, bound):
        hidden, logits = self.forward(theta, x)
        d2 = logits.softmax(-1)
        d2[:, torch.arange(len(y)), y] -= 1
        squares = (x.square().sum(-1) + 1) * d2.square().sum(-1)
        if hidden is not None:
            d1 = (d2 @ self.parts(theta)[2]) * (1 - hidden.square())
            squares = (hidden.square().sum(-1) + 1) * d2.square().sum(-1)
            squares = squares + (x.square().sum(-1) + 1) * d1.square().sum(-1)
        factor = (bound.view(-1, 1) / squares.sqrt()).clamp(max=1.0).unsqueeze(-1)
        factor = torch.where(torch.isfinite(factor), factor, 1.0)  # a gradient of zero, or of a run that has diverged
        d2 = d2 * factor
        if hidden is None:
            grads = [d2.mT @ x, d2.sum(1)]
        else:
            d1 = d1 * factor
            grads = [d1.mT @ x, d1.sum(1), d2.mT @ hidden, d2.sum(1)]
        return torch.cat([g.flatten(1) for g in grads], 1)


class Residual(NamedTuple):
    """Linear → x + Linear(ReLU(Linear(LayerNorm(x)))), twice → Linear; ``embedded`` maps all columns after ``measured``.

    It stands for K rows of parameters in ``train`` and ``evaluate``, as :class:`Net` does.
    """

    features: int
    classes: int
    measured: int = 0
    embedded: int = 0
    width: int = HIDDEN
    scale: float = 3.0

    @property
    def layers(self):
        """(inputs, outputs) of every layer; a LayerNorm has 0 inputs."""
        embedding = [(self.features - self.measured, self.embedded)] if self.embedded else []
        first = self.measured + self.embedded if self.embedded else self.features
        blocks = BLOCKS * [(0, self.width), (self.width, self.width), (self.width, self.width)]
        return [*embedding, (first, self.width), *blocks, (self.width, self.classes)]

    @property
    def matrices(self):
        return [s for i, o in self.layers for s in ((o, i or 1), (o, 1))]

    def start(self, seed):
        """Torch's own weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            modules = [nn.Linear(i, o) if i else nn.LayerNorm(o) for i, o in self.layers]
        return torch.cat([p.detach().flatten() for m in modules for p in m.parameters()])

    def taps(self, theta, x):
        """Logits [K, n, classes], and per layer its input (normalised, for a LayerNorm) and its output."""
        pieces = theta.split([r * c for r, c in self.matrices], 1)
        weights, found = zip(self.layers, pieces[::2], pieces[1::2], strict=True), []

        def layer(a):
            (i, o), w, b = next(weights)
            a = a if i else F.layer_norm(a, (o,))
            z = (a @ w.view(-1, o, i).mT if i else a * w.unsqueeze(1)) + b.unsqueeze(1)
            found.append((a, z if z.requires_grad else z.requires_grad_()))
            return z

        x = x.expand(len(theta), *x.shape)
        if self.embedded:
            x = torch.cat([x[..., : self.measured], layer(x[..., self.measured :])], -1)
        x = layer(x)
        for _ in range(BLOCKS):
            x = x + layer(layer(layer(x)).relu())
        return layer(x), found

    def forward(self, theta, x):
        return None, self.taps(theta, x)[0].detach()

    def clipped_sums(self, theta, x, y, bound):
        """Σ min(1, C/‖g‖) g of K models, [K, P]."""
        at_once = max(32, CACHED // (len(theta) * self.width))
        both = zip(x.split(at_once), y.split(at_once), strict=True)
        return sum((self._sums(theta, *some, bound) for some in both), torch.zeros_like(theta))

    def _sums(self, theta, x, y, bound):
        logits, taps = self.taps(theta, x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(theta)), reduction="sum")
        slopes = torch.autograd.grad(loss, [z for _, z in taps])
        layers = [(i, a.detach(), d) for (i, _), (a, _), d in zip(self.layers, taps, slopes, strict=True)]
        squares = sum(
            (a.square().sum(-1) + 1) * d.square().sum(-1) if i else ((a.square() + 1) * d.square()).sum(-1)
            for i, a, d in layers
        )
        factor = (bound.view(-1, 1) / squares.sqrt()).clamp(max=1.0).unsqueeze(-1)
        factor = torch.where(torch.isfinite(factor), factor, 1.0)
        layers = [(i, a, d * factor) for i, a, d in layers]
        grads = [g for i, a, d in layers for g in (d.mT @ a if i else (d * a).sum(1), d.sum(1))]
        return torch.cat([g.flatten(1) for g in grads], 1)


class Block(NamedTuple):
    """Runs of one method: their rule, place and hyperparameters, as ``Stack`` has them."""

    rows: Rows
    place: slice
    hyper: dict[str, Tensor]


def blocks(specs, net, mean, n, batch, steps, sigma):
    """One block per method; every run keeps the average of its iterates."""
    found = []
    for method in dict.fromkeys(s.method for s in specs):
        at = [i for i, s in enumerate(specs) if s.method == method]
        defaults = defaults_of(method)
        keys, columns = ["lr", *FILLED, *defaults, "ema"], []
        for i in at:
            own = {"lr": specs[i].lr, "ess": float(n), "batch_size": float(batch), "scale": 1.0}
            if "steps" in defaults:
                own["steps"] = float(steps)
                own["scale"] = weight_scale(mean[i].split([r * c for r, c in net.matrices]), net.matrices)
            values = defaults | own | {"ema": window_decay(float(steps))}
            columns.append([float(values[key]) for key in keys])
        hyper = {key: torch.tensor(columns)[:, j : j + 1] for j, key in enumerate(keys)}
        noise = torch.tensor([[(sigma * specs[i].bound / batch) ** 2] for i in at])
        rows = Rows(rule_of(method, "", net.matrices), averaged=True)
        found.append(Block(rows, slice(at[0], at[-1] + 1), hyper | {"noise_variance": noise}))
    return found


def train(net, specs, x, y, *, sigma, batch, steps, seed, prior=False, watch=None):
    """The last iterates and their averages, [K, P] each. Specs of one method stand together.

    ``prior``: whether the network's own N(μ, v), around its start, is a prior; for methods that take one.
    ``watch``: called after every step with its number and each method's (block, state).
    """
    n = len(x)
    generator = torch.Generator().manual_seed(seed)
    mean = net.start(seed).repeat(len(specs), 1)
    bound = torch.tensor([s.bound for s in specs])
    parts = blocks(specs, net, mean, n, batch, steps, sigma)
    states = [p.rows.start(mean[p.place].clone(), p.hyper) for p in parts]
    if prior:
        mu, v = net.prior(seed)
        states = [s | {"prior_mean": mu, "prior_decay": 1 / (v * n)} for s in states]
    x = x * net.scale
    for t in range(1, steps + 1):
        normal = torch.randn(mean.shape, generator=generator)
        theta = torch.cat([p.rows.theta(s, normal[p.place], p.hyper) for p, s in zip(parts, states, strict=True)])
        drawn = slice(None) if batch >= n else (torch.rand(n, generator=generator) < batch / n).nonzero().flatten()
        sums = net.clipped_sums(theta, x[drawn], y[drawn], bound).double()
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        g = ((sums + sigma * bound.unsqueeze(1) * noise) / batch).float()
        states = [
            p.rows.step(s, g[p.place], normal[p.place], torch.tensor(t), p.hyper)
            for p, s in zip(parts, states, strict=True)
        ]
        if watch is not None:
            watch(t, list(zip(parts, states, strict=True)))
    return torch.cat([s["mean"] for s in states]), torch.cat([s["average"] for s in states])


# ---- scores


def auc(score, positive):
    """Area under the ROC curve, ties counted half."""
    both = torch.cat([score[positive], score[~positive]])
    _, place, counts = both.unique(return_inverse=True, return_counts=True)
    rank = counts.cumsum(0).double() - (counts.double() - 1) / 2
    p, m = int(positive.sum()), int((~positive).sum())
    return float((rank[place][:p].sum() - p * (p + 1) / 2) / (p * m))


def scores(logits, y, prior):
    """Accuracy and NLL; and balanced, every class weighing the same: the public prior is divided out of the probabilities."""
    if not bool(torch.isfinite(logits).all()):
        return dict.fromkeys(("accuracy", "nll", "balanced_nll", "auc", "balanced_accuracy"), math.nan)
    logits = logits.double()
    logp, even = logits.log_softmax(-1), (logits - prior.log()).log_softmax(-1)
    classes = range(logits.shape[-1])
    areas = [auc(even[:, c], y == c) for c in (classes if len(classes) > 2 else (1,))]
    wrong = -even[torch.arange(len(y)), y]
    return {
        "accuracy": float((logp.argmax(-1) == y).double().mean()),
        "nll": float(-logp[torch.arange(len(y)), y].mean()),
        "balanced_nll": sum(float(wrong[y == c].mean()) for c in classes) / len(classes),
        "auc": sum(areas) / len(areas),
        "balanced_accuracy": sum(float((even.argmax(-1)[y == c] == c).double().mean()) for c in classes) / len(classes),
    }


def evaluate(net, theta, parts, prior):
    """One dictionary per run, scores of validation and test."""
    found = []
    for part in ("validation", "test"):
        x, y = parts[part]
        logits = torch.cat([net.forward(rows, x * net.scale)[1] for rows in theta.split(8)])
        found.append([{f"{part}_{k}": v for k, v in scores(one, y, prior).items()} for one in logits])
    return [a | b for a, b in zip(*found, strict=True)]
