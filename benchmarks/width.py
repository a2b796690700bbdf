"""What the width of a kept posterior, and the number of draws that are averaged, do to its scores on held-out pictures.

    dpivon study run experiments/strong_privacy/studies/width.yaml --keep --out OUT --data DATA
    python -m benchmarks.width OUT --data DATA --json width.json     # seven minutes of two cores

    python -m benchmarks.width OUT --data DATA --tempered --json width-tempered.json     # as long again

The variance of every weight is multiplied by each trace in turn. Nothing is trained, and only the study's own validation or
test pictures are looked at: with `split: tuning` these are training pictures that were held out. With `--tempered` a
temperature is chosen for each trace on pictures of the training data, as the recipe does, but without noise; and the held-out
pictures are looked at clean and under every corruption, in two severities.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path

import torch
from torch.func import functional_call

from dpivon import Posterior
from dpivon.data import MEAN, STD
from dpivon.data.corruptions import CORRUPTIONS, corrupt
from dpivon.metrics import batch_scores
from dpivon.study.datasets import build_network, load_data
from dpivon.study.plan import read_plan
from dpivon.study.predict import normalised
from dpivon.temperature import log_probabilities, temper

TRACES, DRAWS = (0.5, 1.0, 2.0), (8, 16, 32, 64)
TEMPERED, AVERAGED, PICTURES, SHIFTED, SEVERITIES = (0.0, 0.1, 0.25, 0.5, 1.0), 16, 2500, 500, (2, 4)


@torch.no_grad()
def said(model, weights, pictures):
    return torch.cat([functional_call(model, weights, (part,)).softmax(-1) for part in pictures.split(64)])


def kept(out, data):
    """The study's data, its model and its one posterior."""
    plan = read_plan(out / "study.json")
    held = load_data(plan, data, torch.device("cpu"))
    (file,) = (out / "posteriors").iterdir()
    network = build_network(plan, held)
    model = network.model(network.initial(0)).eval().to(memory_format=torch.channels_last)
    return held, model, Posterior.load(file)


def scored(probs, labels):
    return batch_scores(probs[None], labels)[0]


def drawn(posterior, trace, generator):
    """Weights from the posterior with its variances times ``trace``."""
    scale = math.sqrt(trace)
    return {
        k: m + scale * posterior.std[k] * torch.randn(m.shape, generator=generator) for k, m in posterior.mean.items()
    }


def table(out, data, seed=0):
    """Rows of scores: the mean first, then every trace and number of draws. The draws of one trace are nested."""
    held, model, posterior = kept(out, data)
    pictures, labels = held.eval_images.contiguous(memory_format=torch.channels_last), held.eval_labels
    rows = [{"trace": 0.0, "draws": 0} | scored(said(model, posterior.mean, pictures), labels)]
    generator = torch.Generator().manual_seed(seed)
    for trace in TRACES:
        total = torch.zeros_like(said(model, posterior.mean, pictures[:1]).expand(len(labels), -1))
        for n in range(1, max(DRAWS) + 1):
            total = total + said(model, drawn(posterior, trace, generator), pictures)
            if n in DRAWS:
                rows.append({"trace": trace, "draws": n} | scored(total / n, labels))
                print(shown(rows[-1]), flush=True)
    return rows, len(labels)


def tempered_table(out, data, seed=0):
    """Rows of scores, raw and after a temperature, clean (severity 0) and under shift, for every trace."""
    held, model, posterior = kept(out, data)
    clean, labels = held.eval_images[:SHIFTED], held.eval_labels[:SHIFTED]
    raw = (clean * STD + MEAN).clamp(0, 1)
    shifted = [(k, normalised(corrupt(raw, name, k, seed=0))) for name in CORRUPTIONS for k in SEVERITIES]
    parts = [held.images[:PICTURES], held.eval_images[:PICTURES], *(x for _, x in shifted)]
    pictures = torch.cat(parts).contiguous(memory_format=torch.channels_last)
    rows = []
    for trace in TEMPERED:
        generator = torch.Generator().manual_seed(seed)  # the same normals for every trace
        draws = AVERAGED if trace else 1
        probs = sum(said(model, drawn(posterior, trace, generator), pictures) for _ in range(draws)) / draws
        training, held_out, *corrupted = probs.split([len(part) for part in parts])
        best = best_temperature(training, held.labels[:PICTURES])
        for t in (1.0, best):
            scores = {0: [scored(temper(held_out, t), held.eval_labels[:PICTURES])]}
            for (severity, _), p in zip(shifted, corrupted, strict=True):
                scores.setdefault(severity, []).append(scored(temper(p, t), labels))
            for severity, found in scores.items():
                mean = {key: sum(score[key] for score in found) / len(found) for key in found[0]}
                rows.append({"trace": trace, "draws": draws, "temperature": t, "severity": severity} | mean)
                print(f"T {t:.2f}, severity {severity}, {shown(rows[-1])}", flush=True)
    return rows, PICTURES


def best_temperature(probs, labels):
    """The T of least NLL, on a grid of steps of 2 %."""
    logs, grid = log_probabilities(probs), torch.logspace(-0.7, 0.9, 187)
    nll = [-(logs / t).log_softmax(-1).gather(1, labels[:, None]).mean() for t in grid]
    return float(grid[torch.stack(nll).argmin()])


def shown(row):
    scores = "  ".join(f"{k} {row[k]:.4f}" for k in ("accuracy", "nll", "ece"))
    return f"trace {row['trace']:3g}, {row['draws']:2d} draws: {scores}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a study with one run, kept")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tempered", action="store_true", help="after a temperature, and under shift")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows, pictures = (tempered_table if args.tempered else table)(args.out, args.data)
    if not args.tempered:
        print(shown(rows[0]).replace("trace   0,  0 draws", "the mean"))
    if args.json:
        facts = {"hardware": f"{platform.machine()}, 2 threads", "torch": torch.__version__, "pictures": pictures}
        args.json.write_text(
            json.dumps(facts | {"study": "experiments/strong_privacy/studies/width.yaml", "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
