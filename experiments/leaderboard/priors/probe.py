"""How good a prior's features are before any private training: least squares on its hidden units, to choose by.

    python -m experiments.leaderboard.priors.probe --data DATA --priors leaves.safetensors … --table probe.csv

Not private: 45,000 training images fit the linear layer and the 5,000 validation images score it. It ranks priors, and no
result is made of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.leaderboard.priors.data import load_split
from experiments.leaderboard.priors.learn import load_prior
from experiments.leaderboard.priors.starts import hidden_units

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)


def ridge_accuracy(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> float:
    """The best accuracy over ridges of least squares on one-hot labels."""
    middle, spread = x.mean(0), x.std(0).clamp_min(1e-6)
    x, held_x = (x - middle) / spread, (held_x - middle) / spread
    target = F.one_hot(y, 10).to(x.dtype) - 0.1
    gram, right, eye = x.T @ x / len(x), x.T @ target / len(x), torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    guesses = [(held_x @ torch.linalg.solve(gram + ridge * eye, right)).argmax(1) for ridge in RIDGES]
    return max(float((guess == held_y).double().mean()) for guess in guesses)


@torch.no_grad()
def flat_maps(network: torch.nn.Module, images: Tensor) -> Tensor:
    """What the hidden layer sees, [N, 2048]."""
    return torch.cat([network.features(x).flatten(1) for x in images.split(2000)])  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--priors", type=Path, nargs="+", required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = load_split(a.data, device, judge=False, toy=a.toy)
    lines = ["prior,hidden_accuracy,maps_accuracy,hidden_rms"]
    for path in a.priors:
        network = load_prior(path).to(device)
        hidden = [hidden_units(network, x).double() for x in (split.images, split.score_images)]
        maps = [flat_maps(network, x).double() for x in (split.images, split.score_images)]
        found = [ridge_accuracy(x, split.labels, held, split.score_labels) for x, held in (hidden, maps)]
        rms = float(hidden[0].square().mean().sqrt())
        lines.append(f"{path.stem},{found[0]:.4f},{found[1]:.4f},{rms:.3f}")
        print(lines[-1], flush=True)
    a.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
