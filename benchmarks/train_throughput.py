"""`dpivon train` on a GPU: images per second of the captured step and of the eager one, 60,000 images of 32 × 32.

    python -m benchmarks.train_throughput
    python -m benchmarks.train_throughput --batch 512 --seconds 15 --json train-throughput-h200.json

Each is a process of its own and a whole run of the command: ledger, loader and account are those that users have. Steps are
timed after the first 60, which compile. `bf16` is the captured step with `--precision bf16`; `before` is the eager path with a
batch collated image by image and 256 at once, as version 0.2 had it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

PATHS = ("bf16", "captured", "eager", "before")
WARM = 60


class Enough(Exception):
    """The clock has run long enough."""


def images(folder, count, side):
    draw = np.random.default_rng(0)
    y = draw.integers(0, 10, count)
    x = (draw.random((count, 3, side, side), dtype=np.float32) * 200 + 5 * y[:, None, None, None]).astype(np.uint8)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return f"{folder / 'x.npy'},{folder / 'y.npy'}"


def worker(args):
    from torch.utils.data import TensorDataset

    from dpivon.durable.ledger import Ledger
    from dpivon.privacy.compiled import CompiledStep
    from dpivon.train import kept
    from dpivon.train.config import resolve
    from dpivon.train.run import Watcher, train

    warnings.simplefilter("ignore")
    given = {"data": args.data, "epsilon": 8.0, "delta": 1e-6, "dataset_size": args.images, "accountant": "rdp"}
    given |= {
        "classes": tuple("0123456789"),
        "value_bounds": {"min": 0, "max": 255},
        "device": args.device,
        "batch_size": args.batch,
    }
    given |= {"epochs": 1000, "lr": 0.1, "network": "paper"}
    if args.worker == "bf16":
        given["precision"] = "bf16"
    if args.worker == "before":
        kept.Rows = TensorDataset
        given["physical_batch_size"] = 256
    if args.worker in ("eager", "before"):
        made = CompiledStep.__init__
        CompiledStep.__init__ = lambda self, *a, **how: made(self, *a, **how | {"capture": False})
    charges, charge = [], Ledger.charge

    def timed(*a, **how):
        begin = time.perf_counter()
        charge(*a, **how)
        charges.append(time.perf_counter() - begin)

    Ledger.charge = timed

    class Clock(Watcher):
        begun, first = 0.0, 0

        def begin(self, config, description, loop):
            self.loop = loop
            return self.show

        def show(self, line, step):
            if line is not None or step < WARM or step % 20:
                return
            if self.loop.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if not self.first:
                self.begun, self.first = now, step
                charges.clear()
            elif now - self.begun > args.seconds:
                each = (now - self.begun) / (step - self.first)
                found = {"path": self.loop.step.path, "ms": 1e3 * each, "images_per_second": args.batch / each}
                found["charge_ms"] = 1e3 * sum(charges) / len(charges)
                found["steps"] = step - self.first
                print(json.dumps(found), flush=True)
                raise Enough

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Enough):
        train(resolve(given | {"out": str(Path(folder) / "run")}), Clock())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", nargs="*", choices=PATHS, default=list(PATHS))
    parser.add_argument("--json")
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        data = images(Path(folder), args.images, args.side)
        for name in args.only:
            command = [sys.executable, "-m", "benchmarks.train_throughput", *sys.argv[1:], "--data", data]
            done = subprocess.run([*command, "--worker", name], stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode or not done.stdout.strip():
                print(f"{name}: failed", file=sys.stderr, flush=True)
                continue
            rows[name] = row = json.loads(done.stdout.splitlines()[-1])
            for own in rows.keys() & {"bf16", "captured"}:
                for other in rows.keys() & {"eager", "before"}:
                    rows[own][f"over_{other}"] = rows[other]["ms"] / rows[own]["ms"]
            print(f"{name:9s} {json.dumps(row)}", flush=True)
            if args.json:
                gpu = torch.cuda.get_device_name() if args.device == "cuda" else args.device
                facts = {"batch": args.batch, "images": args.images, "hardware": gpu, "torch": torch.__version__}
                facts["command"] = " ".join(["python -m benchmarks.train_throughput", *sys.argv[1:]])
                Path(args.json).write_text(json.dumps(facts | {"rows": rows}, indent=1))
    print(json.dumps({name: row for name, row in rows.items() if name in ("bf16", "captured")}))
    return None


if __name__ == "__main__":
    main()
