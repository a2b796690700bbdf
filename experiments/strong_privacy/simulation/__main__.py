"""The command: both parts, or one of them, into one folder."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import experiments.strong_privacy.simulation
from dpivon.data import load_digits
from experiments.strong_privacy.simulation import EPSILONS, OUT, SEEDS
from experiments.strong_privacy.simulation.page import figure, tables
from experiments.strong_privacy.simulation.training import summary, trained
from experiments.strong_privacy.simulation.truth import against_truth


def main():
    parser = argparse.ArgumentParser(
        "python -m experiments.strong_privacy.simulation",
        description=experiments.strong_privacy.simulation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=["both", "truth", "training"], default="both")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits()
    began = time.perf_counter()
    result = {"torch": torch.__version__.split("+")[0]}
    if args.part != "training":
        result["truth"] = {}
        for e in EPSILONS:
            result["truth"][f"{e:g}"] = against_truth(digits, e)
            print(f"truth, epsilon {e:g}: {time.perf_counter() - began:.0f} s", flush=True)
    if args.part != "truth":
        rows = []
        for e in EPSILONS:
            rows += trained(digits, e, args.seeds)
            print(f"training, epsilon {e:g}: {time.perf_counter() - began:.0f} s", flush=True)
        result |= {"training": summary(rows), "runs": rows}
    result["seconds"] = time.perf_counter() - began
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "simulation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (args.out / "simulation.md").write_text(tables(result))
    if args.part == "both":
        figure(result, args.out / "simulation.png")
    print(tables(result))


if __name__ == "__main__":
    main()
