"""What each method costs beside DP-SGD: time and memory of a private step, and bytes of state a weight.

    python -m benchmarks.methods                    # the paper's CNN, b = 256, one thread of this machine's CPU
    python -m benchmarks.methods --device cuda --json methods.json

All run the same engine, clipping and noise (book-keeping) on one fixed batch, each in a process of its own, so that peak
memory is its own; they take turns for several rounds and the median is taken over all of them, so that a drifting machine
drifts for all. On a CPU the time is the process's own CPU time, which waiting for a busy machine does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time


def make_step(name, batch, device, ema):
    """A function that makes one step of the method, and the learner."""
    import warnings

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import dpivon
    from dpivon.models import PaperCNN

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(0, 10, (batch,), device=device)
    learner = dpivon.method(name, PaperCNN().to(device), dataset_size=50_000, lr=1e-3, ema=ema)
    model, optimizer, _ = learner.make_private(
        dpivon.PrivacyEngine(),
        DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    loss_fn = nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad()
        with learner.sample():
            loss_fn(model(x), y).backward()
        optimizer.step()

    return step, learner


def state_floats(learner):
    """Numbers kept between steps for each weight of the network as it was given: weights, optimizer state, averages."""
    from torch import Tensor

    from dpivon.models import PaperCNN

    given = sum(p.numel() for p in PaperCNN().parameters())
    kept = sum(p.numel() for p in learner.model.parameters())
    state = learner.optimizer.state.values()
    kept += sum(t.numel() for s in state for t in s.values() if isinstance(t, Tensor))
    if learner.average is not None:
        kept += sum(t.numel() for t in learner.average._average.values())
    return kept / given


def worker(args):
    import torch

    torch.set_num_threads(args.threads)
    name, _, suffix = args.worker.partition("+")
    step, learner = make_step(name, args.batch, args.device, 0.99 if suffix == "ema" else None)
    cuda = args.device == "cuda"
    for _ in range(args.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if cuda else time.process_time
    times = []
    for _ in range(args.steps):
        start = clock()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(clock() - start)
    peak = (
        torch.cuda.max_memory_allocated() / 2**20 if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    )
    print(json.dumps({"times": times, "peak_mb": peak, "floats": state_floats(learner)}))


def main():
    from dpivon.methods import METHODS

    everything = [*(name for name in METHODS if name != "ivon"), "dp-sgd+ema"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=everything, default=everything)
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)

    import torch

    times, facts = {name: [] for name in args.only}, {}
    for _ in range(args.rounds):
        for name in args.only:
            command = [sys.executable, "-m", "benchmarks.methods", "--worker", name, "--batch", str(args.batch)]
            command += ["--device", args.device, "--threads", str(args.threads)]
            command += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{name}: failed\n{run.stderr[-800:]}", file=sys.stderr)
                return 1
            result = json.loads(run.stdout.strip().splitlines()[-1])
            times[name] += result.pop("times")
            result["peak_mb"] = max(result["peak_mb"], facts.get(name, result)["peak_mb"])
            facts[name] = result
    base = statistics.median(times["dp-sgd"]) if "dp-sgd" in times else float("nan")
    rows = {
        name: {
            "ms": 1e3 * statistics.median(t),
            "time": statistics.median(t) / base,
            "peak_mb": facts[name]["peak_mb"],
            "memory": facts[name]["peak_mb"] / facts["dp-sgd"]["peak_mb"] if "dp-sgd" in facts else float("nan"),
            "floats": facts[name]["floats"],
        }
        for name, t in times.items()
    }
    hardware = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} thread(s)"
    )
    print(f"the paper's CNN, b = {args.batch}, {hardware}, torch {torch.__version__}")
    print(f"{'':24s} {'ms':>8s} {'time':>6s} {'peak MB':>8s} {'memory':>7s} {'numbers/weight':>15s}")
    for name, row in rows.items():
        print(
            f"{name:24s} {row['ms']:8.1f} {row['time']:6.2f} {row['peak_mb']:8.0f} {row['memory']:7.2f} {row['floats']:15.1f}"
        )
    if args.json:
        said = {"batch": args.batch, "hardware": hardware, "torch": torch.__version__, "rounds": args.rounds}
        said |= {
            "command": " ".join(["python -m benchmarks.methods", *sys.argv[1:]]),
            "steps": args.steps,
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(said, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
