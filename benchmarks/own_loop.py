"""The user's own loop on a GPU, fed by a CPU loader with pinned memory: milliseconds per step, and ratios within one run.

    python -m benchmarks.own_loop --batch 512 128 --json own-loop-h200.json
    python -m benchmarks.own_loop --batch 512 --profile ours    # no figures: where the time of one contender goes

There are three processes per batch size: ours, plain, and those that are not compiled. They get ready side by side, each its
contenders one after the other, since these share programs. Then one contender at a time makes blocks of steps while the clock
runs, and the device is waited for once per block, as in a loop that does not print. Every figure is printed and in the file as
soon as it is known. Images are bytes, normalised on the GPU; the network is the paper's CNN.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CONTENDERS = {
    "plain-resident": "non-private SGD, bf16, compiled and captured, data on the GPU",
    "plain-captured": "non-private SGD, bf16, compiled and captured",
    "plain": "non-private SGD, bf16, eager",
    "opacus": "Opacus DP-SGD, hooks",
    "ours-eager": "dpivon DP-IVON, bf16, eager loop",
    "ours": "dpivon DP-IVON, bf16, engine.compile",
    "ours-sgd": "dpivon DP-SGD, bf16, engine.compile",
}
BLOCK = 20
N = 50_000


class Images(Dataset):
    """Bytes and labels; batches are fetched whole."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.y = torch.randint(0, 10, (N,), generator=generator)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i]

    def __getitems__(self, index):
        index = torch.tensor(index, dtype=torch.int64)
        return self.x[index], self.y[index]


def same(batch):
    return batch


def normalised(x):
    return x.float().sub_(127.5).div_(64.0)


def endless(loader):
    while True:
        yield from loader


def blocks(step, loader, *kept):
    """A function that makes a block of steps on batches of the loader; ``kept`` is what a CUDA graph reads and writes."""
    batches = endless(loader)

    def run():
        for _ in range(BLOCK):
            step(next(batches))

    run.kept = kept
    return run


def make(contender, batch, workers):
    from dpivon.models import PaperCNN

    torch.manual_seed(0)
    model = PaperCNN().cuda()
    settings = {"num_workers": workers, "pin_memory": True, "collate_fn": same, "persistent_workers": workers > 0}
    images = Images()
    loader = DataLoader(images, batch_size=batch, shuffle=True, drop_last=True, **settings)

    def losses(model, rows, **how):
        x, y = (t.cuda(non_blocking=True) for t in rows)
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(normalised(x)), y, **how)

    if contender.startswith("plain"):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        if contender == "plain":

            def eager(rows):
                optimizer.zero_grad()
                losses(model, rows).backward()
                optimizer.step()

            return blocks(eager, loader)
        from benchmarks.plain import plain_step

        x, y = torch.empty(batch, 3, 32, 32, dtype=torch.uint8, device="cuda"), torch.zeros(batch, device="cuda").long()
        x.copy_(images.x[:batch])
        replay = plain_step(torch.nn.Sequential(_Normalised(), model), x, y, compiled=True, captured=True)

        def captured(rows):
            x.copy_(rows[0], non_blocking=True)
            y.copy_(rows[1], non_blocking=True)
            replay()

        if contender == "plain-resident":
            return blocks(lambda rows: replay(), [None], x, y, model)
        return blocks(captured, loader, model)

    loader = DataLoader(images, batch_size=batch, **settings)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    if contender == "opacus":
        from opacus import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=loader, **options
        )

        def hooks(rows):
            optimizer.zero_grad()
            x, y = (t.cuda(non_blocking=True) for t in rows)
            F.cross_entropy(model(normalised(x)), y).backward()
            optimizer.step()

        return blocks(hooks, loader)

    import dpivon

    optimizer = dpivon.IVON(model.parameters(), lr=1e-3, ess=N)
    if contender == "ours-sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    engine = dpivon.PrivacyEngine()
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
    if contender == "ours-eager":

        def own(rows):
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                losses(model, rows).backward()
            optimizer.step()

        return blocks(own, loader)
    step = engine.compile(lambda model, rows: losses(model, rows, reduction="none"))
    run = blocks(step, loader)
    run.path = lambda: step.path
    return run


class _Normalised(torch.nn.Module):
    def forward(self, x):
        return normalised(x)


def worker(args):
    """Makes each of its contenders; then times the one whose name it reads, until there are no more."""
    warnings.simplefilter("ignore")
    runs = {}
    for name in args.worker:
        try:
            begun = time.perf_counter()
            runs[name] = run = make(name, args.batch[0], args.workers)
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            path = f", {run.path()}" if hasattr(run, "path") else ""
            print(f"{name}: ready after {time.perf_counter() - begun:.0f} s{path}", file=sys.stderr, flush=True)
        except Exception as error:
            runs.pop(name, None)
            print(f"{name}: failed ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
    if args.profile:
        return profile(*runs.values())
    print(json.dumps(list(runs)), flush=True)
    for line in sys.stdin:
        run, times = runs[line.strip()], []
        for _ in range(args.blocks + 1):  # the first refills the loader's queue
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / BLOCK)
        print(json.dumps(times[1:]), flush=True)
    return None


def profile(run):
    """Where the host's time goes, and the device's."""
    import cProfile
    import pstats

    with cProfile.Profile() as host:
        for _ in range(5):
            run()
    pstats.Stats(host).sort_stats("cumulative").print_stats(45)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as device:
        run()
        torch.cuda.synchronize()
    print(device.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60))


def figures(times):
    """Of each contender: milliseconds, and ratios to the others."""
    ms, nan = {name: 1e3 * statistics.median(t) for name, t in times.items() if t}, float("nan")
    best = min((ms[name] for name in ms if name.startswith("plain-")), default=nan)
    return {
        name: {
            "ms": value,
            "over_captured": value / ms.get("plain-captured", nan),
            "over_resident": value / ms.get("plain-resident", nan),
            "over_best": value / best,
            "opacus_over": ms.get("opacus", nan) / value,
            "blocks": len(times[name]),
        }
        for name, value in ms.items()
    }


def write(args, times):
    if args.json:
        facts = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "workers": args.workers}
        facts |= {"commit": os.environ.get("DPIVON_COMMIT", ""), "network": "the paper's CNN"}
        facts["command"] = " ".join(["python -m benchmarks.own_loop", *sys.argv[1:]])
        with open(args.json, "w") as file:
            json.dump(facts | {"batches": {batch: figures(mine) for batch, mine in times.items()}}, file, indent=1)


def table(args, times):
    for batch, mine in times.items():
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.workers} workers"
        print(f"paper's CNN, b = {batch}, {where}")
        print(f"{'':62s} {'ms':>7s} {'/ captured':>10s} {'/ resident':>10s} {'Opacus /':>9s}")
        for name, row in figures(mine).items():
            a, b, c, d = (row[key] for key in ("ms", "over_captured", "over_resident", "opacus_over"))
            print(f"{CONTENDERS[name]:62s} {a:7.3f} {b:10.2f} {c:10.2f} {d:9.2f}", flush=True)


def started(args, batch, names):
    """A process that gets these contenders ready."""
    command = [sys.executable, "-m", "benchmarks.own_loop", "--batch", str(batch), "--worker", *names]
    command += ["--workers", str(args.workers), "--blocks", str(args.blocks)]
    own = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 2) // 2)), **os.environ}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[512])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument(
        "--profile", choices=list(CONTENDERS), help="print where the time of this one goes, and nothing else"
    )
    parser.add_argument("--json")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.worker = [args.profile] if args.profile else args.worker
    if args.worker:
        return worker(args)
    groups = (("ours", "ours-sgd"), ("plain-resident", "plain-captured"), ("opacus", "plain", "ours-eager"))
    kept = [names for group in groups if (names := [name for name in group if name in args.only])]
    processes = [(batch, started(args, batch, names)) for batch in args.batch for names in kept]
    ready = [(batch, process, json.loads(process.stdout.readline() or "[]")) for batch, process in processes]
    times = {batch: {} for batch in args.batch}
    for _ in range(args.rounds):
        for batch, process, names in ready:
            for name in names:
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
                times[batch].setdefault(name, []).extend(json.loads(process.stdout.readline()))
                print(f"b = {batch}, {name}: {figures(times[batch])[name]['ms']:.3f} ms", file=sys.stderr, flush=True)
                write(args, times)
    for _, process in processes:
        process.stdin.close()
    for _, process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
    table(args, times)
    return None


if __name__ == "__main__":
    main()
