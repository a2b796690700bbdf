"""What the width of a kept posterior, and the number of draws that are averaged, do to its scores on held-out pictures.

    dpivon study run studies/width.yaml --keep --out OUT --data DATA
    python -m benchmarks.width OUT --data DATA --json results/strong-privacy/width.json     # seven minutes of two cores

The variance of every weight is multiplied by each trace in turn. Nothing is trained, and only the study's own validation or
test pictures are looked at: with `split: tuning` these are training pictures that were held out.
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
from dpivon.study.datasets import build_network, load_data
from dpivon.study.evaluate import label_scores
from dpivon.study.plan import read_plan

TRACES, DRAWS = (0.5, 1.0, 2.0), (8, 16, 32, 64)


@torch.no_grad()
def said(model, weights, pictures):
    return torch.cat([functional_call(model, weights, (part,)).softmax(-1) for part in pictures.split(64)])


def table(out, data, seed=0):
    """Rows of scores: the mean first, then every trace and number of draws. The draws of one trace are nested."""
    plan = read_plan(out / "study.json")
    held = load_data(plan, data, torch.device("cpu"))
    pictures, labels = held.eval_images.contiguous(memory_format=torch.channels_last), held.eval_labels
    (file,) = (out / "posteriors").iterdir()
    posterior = Posterior.load(file)
    network = build_network(plan, held)
    model = network.model(network.initial(0)).eval().to(memory_format=torch.channels_last)
    rows = [{"trace": 0.0, "draws": 0} | label_scores(said(model, posterior.mean, pictures), labels)]
    generator = torch.Generator().manual_seed(seed)
    for trace in TRACES:
        total = torch.zeros_like(said(model, posterior.mean, pictures[:1]).expand(len(labels), -1))
        for n in range(1, max(DRAWS) + 1):
            noise = {k: torch.randn(v.shape, generator=generator) for k, v in posterior.mean.items()}
            wide = {k: m + math.sqrt(trace) * posterior.std[k] * noise[k] for k, m in posterior.mean.items()}
            total = total + said(model, wide, pictures)
            if n in DRAWS:
                rows.append({"trace": trace, "draws": n} | label_scores(total / n, labels))
                print(shown(rows[-1]), flush=True)
    return rows, len(labels)


def shown(row):
    scores = "  ".join(f"{k} {row[k]:.4f}" for k in ("accuracy", "nll", "ece"))
    return f"trace {row['trace']:3g}, {row['draws']:2d} draws: {scores}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a study with one run, kept")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows, pictures = table(args.out, args.data)
    print(shown(rows[0]).replace("trace   0,  0 draws", "the mean"))
    if args.json:
        facts = {"hardware": f"{platform.machine()}, 2 threads", "torch": torch.__version__, "pictures": pictures}
        args.json.write_text(json.dumps(facts | {"study": "studies/width.yaml", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
