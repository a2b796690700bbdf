"""What a private step costs, as ratios within one run.

    python -m benchmarks.step                                 # the paper's CNN, b = 256, this machine's CPU
    python -m benchmarks.step --model wrn --batch 64 --device cuda
    python -m benchmarks.step --json step.json

Every contender runs in a process of its own, so that peak memory is its own; the contenders take turns for several rounds and
the median is taken over all of them, so that a drifting machine drifts for all. On a GPU all processes start and compile side
by side, and then wait: only one at a time makes steps while the clock runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

CONTENDERS = {
    "plain": "non-private SGD",
    "plain-cl": "non-private SGD, channels_last",
    "plain-cl-64": "non-private SGD, channels_last, micro-batches of 64",
    "opacus-hooks": "Opacus DP-SGD, hooks",
    "opacus-ghost": "Opacus DP-SGD, ghost clipping",
    "opacus-functorch": "Opacus DP-SGD, functorch",
    "plain-bf16": "non-private SGD, bf16",
    "plain-bf16-cl": "non-private SGD, bf16, channels_last",
    "plain-bf16-compiled": "non-private SGD, bf16, compiled",
    "plain-bf16-cl-compiled": "non-private SGD, bf16, channels_last, compiled",
    "plain-bf16-captured": "non-private SGD, bf16, captured",
    "plain-bf16-cl-captured": "non-private SGD, bf16, channels_last, captured",
    "plain-bf16-compiled-captured": "non-private SGD, bf16, compiled, captured",
    "plain-bf16-cl-compiled-captured": "non-private SGD, bf16, channels_last, compiled, captured",
    "ours": "dpivon DP-IVON, book-keeping",
    "ours-cl": "dpivon DP-IVON, book-keeping, channels_last",
    "ours-cl-64": "dpivon DP-IVON, book-keeping, channels_last, micro-batches of 64",
    "ours-compile": "dpivon DP-IVON, engine.compile, nothing chosen by hand",
    "ours-bf16": "dpivon DP-IVON, book-keeping, bf16, in the user's own loop",
    "ours-captured": "dpivon DP-IVON, bf16, the whole step captured (dpivon.fit)",
}
ON_CPU = [name for name in CONTENDERS if "bf16" not in name and "captured" not in name]
ON_CUDA = [name for name in CONTENDERS if not name.endswith(("-64", "-compile"))]


def build(name):
    from dpivon.models import CompactCNN, PaperCNN, TextEncoder, VisionTransformer, WideResNet

    known = {"cnn": PaperCNN, "wrn": WideResNet, "vit": VisionTransformer, "text": TextEncoder, "compact": CompactCNN}
    return known[name]()


def batch_of(name, size, device):
    import torch

    if name == "text":
        return torch.randint(0, 5000, (size, 64), device=device), torch.randint(0, 4, (size,), device=device)
    return torch.randn(size, 3, 32, 32, device=device), torch.randint(0, 10, (size,), device=device)


def make_step(contender, model_name, batch, device):
    """A function that makes one training step of the contender on one fixed batch."""
    import warnings

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = build(model_name).to(device)
    x, y = batch_of(model_name, batch, device)
    loss_fn = nn.CrossEntropyLoss()
    channels_last = "-cl" in contender and model_name in ("cnn", "wrn")
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    micro = 64 if contender.endswith("-64") else batch
    chunks = list(zip(x.split(micro), y.split(micro), strict=True))

    if contender.startswith("plain-bf16"):
        from benchmarks.plain import plain_step

        return plain_step(model, x, y, compiled="-compiled" in contender, captured="-captured" in contender)

    if contender == "ours-captured":
        return captured_step(model, model_name, batch, device)

    if contender.startswith("plain"):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step():
            optimizer.zero_grad()
            for a, b in chunks:
                (loss_fn(model(a), b) * (len(a) / batch)).backward()
            optimizer.step()

        return step

    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    if contender.startswith("opacus"):
        from opacus import PrivacyEngine

        mode = contender.removeprefix("opacus-")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode, **options
        )
        model, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else loss_fn

        def step():
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

        return step

    import dpivon

    optimizer = dpivon.IVON(model.parameters(), lr=1e-3, ess=50000)
    engine = dpivon.PrivacyEngine()
    model, optimizer, _ = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
    assert type(model).__name__ == "BookKeepingModule"
    if contender == "ours-compile":
        compiled = engine.compile(
            lambda model, rows: nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")
        )
        return lambda: compiled((x, y))

    def step():
        for i, (a, b) in enumerate(chunks):
            optimizer.begin_micro_batch(first=i == 0, last=i == len(chunks) - 1)
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                with torch.autocast(device, torch.bfloat16, enabled="-bf16" in contender):
                    loss = loss_fn(model(a), b)
                loss.backward()
            optimizer.step()

    return step


def captured_step(model, model_name, batch, device, examples=50_000, block=16):
    """Blocks of whole steps as ``dpivon.fit`` makes them, sampling included, over resident data."""
    import torch

    from dpivon.stacked import Run, Stack
    from dpivon.stacked.networks import cross_entropy, network_for

    network = network_for(model, cross_entropy)
    x, y = batch_of(model_name, examples, device)
    run = Run("dp-ivon-gradsq", 1, 1.0, 1.0, 1e-3, batch)
    stack = Stack([run], network, x, y, dtype=torch.bfloat16, block=block, start=network.pack(model).unsqueeze(0))

    def steps():
        for _ in stack.train(block):
            pass

    steps.count = block
    return steps


def worker(args):
    """Prepare one contender; then, for every line read, measure it: seconds for each step, and peak memory in MB."""
    import resource

    import torch

    torch.set_num_threads(args.threads)
    step = make_step(args.worker, args.model, args.batch, args.device)
    cuda, clock = args.device == "cuda", time.process_time if args.cpu_time else time.perf_counter
    for _ in range(args.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()  # the peak is of the whole process: what a graph holds was taken before its first replay
    print("ready", flush=True)
    for _ in sys.stdin:
        step()  # awake again, and not measured
        if cuda:
            torch.cuda.synchronize()
        times = []
        for _ in range(args.steps):
            start = clock()
            step()
            if cuda:
                torch.cuda.synchronize()
            times.append((clock() - start) / getattr(step, "count", 1))
        on_device = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"times": times, "peak_mb": on_device if cuda else on_host}), flush=True)


class Contender:
    """A process that prepares itself and then measures when told to."""

    def __init__(self, name, args):
        command = [sys.executable, "-m", "benchmarks.step", "--worker", name, "--model", args.model]
        command += ["--batch", str(args.batch), "--device", args.device, "--threads", str(args.threads)]
        command += ["--steps", str(args.steps), "--warmup", str(args.warmup), *["--cpu-time"] * args.cpu_time]
        self.name, self.errors = name, tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by end()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)

    def ready(self):
        """Wait until it is; False if it failed, with its last words."""
        for line in self.process.stdout:
            if line.strip() == "ready":
                return True
        return self._failed()

    def measure(self):
        """Its times and its peak, or None if it failed."""
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            self._failed()
            return None

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()

    def _failed(self):
        self.process.wait()
        self.errors.seek(0)
        print(f"{self.name}: failed\n{self.errors.read()[-800:]}", file=sys.stderr)
        return False


def rounds_side_by_side(args):
    """(contender, result) in turn: all are prepared first, which on a GPU is mostly compiling."""
    contenders = [Contender(name, args) for name in args.only]
    there = [c for c in contenders if c.ready()]
    for _ in range(args.rounds):
        for contender in there:
            yield contender.name, contender.measure()
    for contender in contenders:
        contender.end()


def rounds_one_by_one(args):
    """(contender, result) in turn, each in a new process: on a CPU, those that wait would hold memory and caches."""
    for _ in range(args.rounds):
        for name in args.only:
            contender = Contender(name, args)
            if contender.ready():
                yield name, contender.measure()
            contender.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["cnn", "wrn", "vit", "text"], default="cnn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS))
    parser.add_argument("--json")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's own time, on a CPU that others use too"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.only = args.only or (ON_CUDA if args.device == "cuda" else ON_CPU)

    import torch

    times, peaks = {name: [] for name in args.only}, dict.fromkeys(args.only, 0.0)
    for name, result in rounds_side_by_side(args) if args.device == "cuda" else rounds_one_by_one(args):
        if result is not None:
            times[name] += result["times"]
            peaks[name] = max(peaks[name], result["peak_mb"])
            print(
                f"{name}: {1e3 * statistics.median(times[name]):.1f} ms, {peaks[name]:.0f} MB",
                file=sys.stderr,
                flush=True,
            )
    rows = {n: {"ms": 1e3 * statistics.median(t), "peak_mb": peaks[n]} for n, t in times.items() if t}
    best = min((row["ms"] for name, row in rows.items() if name.startswith("plain")), default=float("nan"))
    hooks = rows.get("opacus-hooks", {"ms": float("nan"), "peak_mb": float("nan")})
    hardware = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    )
    allocator = os.environ.get("LD_PRELOAD") or "default malloc"
    print(f"model {args.model}, b = {args.batch}, {hardware}, torch {torch.__version__}, {allocator}")
    print(f"{'':62s} {'ms':>9s} {'/ best plain':>13s} {'hooks /':>8s} {'peak MB':>8s}")
    for name, row in rows.items():
        row |= {"over_best_plain": row["ms"] / best, "hooks_over": hooks["ms"] / row["ms"]}
        print(
            f"{CONTENDERS[name]:62s} {row['ms']:9.2f} {row['over_best_plain']:13.2f} {row['hooks_over']:8.2f} "
            f"{row['peak_mb']:8.0f}"
        )
    if args.json:
        facts = {"model": args.model, "batch": args.batch, "hardware": hardware, "torch": torch.__version__}
        facts |= {
            "allocator": allocator,
            "command": " ".join(["python -m benchmarks.step", *sys.argv[1:]]),
            "rounds": args.rounds,
            "steps": args.steps,
        }
        with open(args.json, "w") as file:
            json.dump(facts | {"rows": rows}, file, indent=1)
    return None


if __name__ == "__main__":
    main()
