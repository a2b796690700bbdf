"""What else can be made of a trained run without training it again: views, a charged map of its logits, draws around its mean.

All rows of one run are of the same weights, so they are compared within the run. Three predictors: ``mean``, ``tta`` (the mean
log-probability over ten shifted and mirrored views), and draws (16 of a Gaussian around the mean). Two maps, with parameters
fitted on training images: ``temperature``, and ``vector`` (a factor and an offset per class, Guo et al., 2017; DP-Platt in
Zhang et al., 2023). A network without augmentations has seen its training images but not their mirror images, on which its
confidence is that on new ones: ``mirrored`` fits on these. A *charged* map is fitted by noisy gradients, paid for by
:data:`RESERVE`, which is part of every run's σ; the others are not private, and say what the noise costs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dpivon.metrics import accuracy, ece, nll
from dpivon.temperature import surprise_less_entropy
from experiments.leaderboard.priors.data import Split
from experiments.leaderboard.priors.scores import SHIFTS

#: σ of each release of a charged map (clipped sums of norm 1 over all training images), q (no sample is drawn), releases.
RESERVE = (300.0, 1.0, 100)
#: Gradients that one map takes: two predictors have two maps each.
GRADIENTS = 25
#: A public scale for centred log-probabilities, which brings an example's gradient to about 1.
UNIT = 8.0
#: At which an example's surprise less entropy is clipped: lower ones make the temperature too low.
BOUND = 4.0
DRAWS = 16
#: Widths: multiples of the averaged iterates' own spread, of the root mean square of all weights, of that of each tensor.
WIDTHS = {"trace": (1.0, 2.0, 4.0), "one": (0.1, 0.2, 0.4), "layer": (0.1, 0.2, 0.4)}
#: Training images that the draws' temperature is fitted on, which is not charged.
FITTED = 5000


@torch.no_grad()
def log_probs(network: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([network(x).float().log_softmax(1) for x in images.split(5000)])


def averaged(network: nn.Module, images: Tensor, mirrors: tuple[bool, ...]) -> Tensor:
    """The mean log-probability over shifted views, mirrored or not."""
    side, padded = images.shape[-1], F.pad(images, (2, 2, 2, 2), mode="reflect")
    seen = [padded[..., 2 + y : 2 + y + side, 2 + x : 2 + x + side] for y, x in SHIFTS]
    each = [log_probs(network, v.flip(-1) if mirror else v) for v in seen for mirror in mirrors]
    return torch.stack(each).mean(0).log_softmax(1)


class Map:
    """softmax(factor ⊙ z + offset) of centred log-probabilities z."""

    def __init__(self, factor: Tensor, offset: Tensor) -> None:
        self.factor, self.offset = factor, offset

    def __call__(self, logs: Tensor) -> Tensor:
        return (self.factor * centred(logs) + self.offset).softmax(1)


def centred(logs: Tensor) -> Tensor:
    return logs.clamp_min(-40.0) - logs.clamp_min(-40.0).mean(1, keepdim=True)


def noisy_mean(per_example: Tensor, sigma: float, g: Generator) -> Tensor:
    """Rows clipped to norm 1, added, noised by σ; over their public number."""
    clipped = per_example / per_example.norm(dim=1, keepdim=True).clamp_min(1.0)
    total = clipped.double().sum(0)
    noise = torch.randn(total.shape, generator=g, device=total.device, dtype=total.dtype)
    return ((total + sigma * noise) / len(per_example)).float()


def fit_temperature(logs: Tensor, labels: Tensor, sigma: float, g: Generator) -> Map:
    """GRADIENTS steps in log T, averaged over the second half; from T = 2, about what clipping to 1 asks for."""
    at, found = torch.tensor(0.7, device=logs.device), []
    for step in range(GRADIENTS):
        one = surprise_less_entropy(logs, labels, at.exp()).unsqueeze(1)  # of the NLL in log(1/T)
        at = (at + 1.5 * BOUND * noisy_mean(one / BOUND, sigma, g)[0]).clamp(-2.0, 3.0)
        found += [at] if 2 * step >= GRADIENTS else []
    factor = (-torch.stack(found).mean()).exp()
    return Map(factor.expand(logs.shape[1]), torch.zeros(logs.shape[1], device=logs.device))


def fit_vector(logs: Tensor, labels: Tensor, first: Map, sigma: float, g: Generator) -> Map:
    """GRADIENTS steps in factors and offsets, from a temperature, averaged over the second half."""
    z, hot = centred(logs), F.one_hot(labels, logs.shape[1])
    factor, offset, found = first.factor.clone(), first.offset.clone(), []
    for step in range(GRADIENTS):
        error = (factor * z + offset).softmax(1) - hot
        gradient = 2 * noisy_mean(torch.cat([error * z / UNIT, error], 1) / 2, sigma, g)
        factor = factor - 20.0 / UNIT * gradient[: z.shape[1]]
        offset = offset - 4.0 * gradient[z.shape[1] :]
        found += [torch.stack([factor, offset])] if 2 * step >= GRADIENTS else []
    return Map(*torch.stack(found).mean(0).unbind(0))


def scored(name: str, fitted: str, mapped: str, charged: bool, probs: Tensor, labels: Tensor) -> dict[str, object]:
    values = {"accuracy": accuracy(probs, labels), "nll": nll(probs, labels), "ece": ece(probs, labels)}
    own: dict[str, object] = {"predictor": name, "fitted": fitted, "map": mapped, "charged": int(charged)}
    return own | {key: round(value, 5) for key, value in values.items()}


def mapped_rows(network: nn.Module, split: Split, seed: int) -> list[dict[str, object]]:
    """Both predictors under no map and both maps."""
    g = Generator(split.images.device).manual_seed(seed)
    x, y = split.images, split.labels
    found = []
    for name in ("mean", "tta"):
        if name == "mean":
            shown = log_probs(network, split.score_images)
            fits = {"seen": log_probs(network, x), "mirrored": log_probs(network, x.flip(-1))}
        else:
            shown = averaged(network, split.score_images, (False, True))
            fits = {"seen": averaged(network, x, (False, True)), "mirrored": averaged(network, x, (True,))}
        found.append(scored(name, "", "none", False, shown.softmax(1), split.score_labels))
        for fitted, charged in (("seen", False), ("mirrored", False), ("mirrored", True)):
            sigma, logs = RESERVE[0] * charged, fits[fitted]
            temperature = fit_temperature(logs, y, sigma, g)
            maps = {"temperature": temperature, "vector": fit_vector(logs, y, temperature, sigma, g)}
            found += [scored(name, fitted, m, charged, f(shown), split.score_labels) for m, f in maps.items()]
    return found


@torch.no_grad()
def drawn_rows(network: nn.Module, split: Split, spread: dict[str, Tensor], seed: int) -> list[dict[str, object]]:
    """Draws around the mean, raw and at a temperature; the same for the mean itself. ``spread`` is the iterates' deviation."""
    g = Generator(split.images.device).manual_seed(seed + 1)
    fit_x, fit_y = split.images[:FITTED].flip(-1), split.labels[:FITTED]
    mean = {name: p.detach().clone() for name, p in network.named_parameters()}
    rms = {n: p.square().mean().sqrt() for n, p in mean.items()}
    matrices = [p.flatten() for p in mean.values() if p.ndim > 1]
    whole = torch.cat(matrices).square().mean().sqrt()
    kinds = {"trace": spread, "one": dict.fromkeys(mean, whole), "layer": rms}
    wanted = [("mean", 0.0, 1)] + [(kind, width, DRAWS) for kind, widths in WIDTHS.items() for width in widths]
    found = []
    for kind, width, draws in wanted:
        seen: list[Tensor] = []
        for _ in range(draws):
            for name, p in network.named_parameters():
                noise = torch.randn(p.shape, generator=g, device=p.device)
                p.copy_(mean[name] + width * kinds[kind][name] * noise if width else mean[name])
            seen.append(torch.cat([log_probs(network, fit_x), log_probs(network, split.score_images)]).exp())
        logs = torch.stack(seen).mean(0).clamp_min(1e-30).log()
        fit, shown = logs[: len(fit_y)], logs[len(fit_y) :]
        title = f"draws {kind} {width:g}" if width else "draws none"
        found.append(scored(title, "", "none", False, shown.exp(), split.score_labels))
        one = fit_temperature(fit, fit_y, 0.0, g)
        found.append(scored(title, "mirrored", "temperature", False, one(shown), split.score_labels))
    for name, p in network.named_parameters():
        p.copy_(mean[name])
    return found
