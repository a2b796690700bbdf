"""Constants of the cost model that a machine with a few CPU cores can measure.

    python -m benchmarks.cost_measure --json benchmarks/results/cost-cpu.json

communication  reduction to the first rank and broadcast of P doubles over gloo on loopback, by the number of ranks
noise          seconds to make a release of P numbers from their sums, by PyTorch's generator and by the operating system's
parameters     seconds of a whole private step that a parameter costs, where examples cost nothing
transformer    private and plain steps of a small GPT-2, all of it trained or LoRA alone: time, and peak memory an example

Times are of the processor, but for communication, which is the shortest of nine by the clock.
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
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon import IVON, PrivacyEngine
from dpivon.privacy.mechanism import NoiseSpec, release
from dpivon.privacy.noise import SecureNoise, TorchNoise

RANKS, SIZES = (2, 4), (10**5, 10**6, 10**7)
LENGTH, WIDTH, DEPTH, RANK = 128, 256, 4, 8  # of the small GPT-2 and its adapters
SMALL, LARGE = 8, 24  # batches
KINDS = ("plain-full", "private-full", "plain-lora", "private-lora")


def seconds(call, repeats: int = 7) -> float:
    """Processor time of one thread, the median: a machine that others use takes longer by the clock."""
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def shortest(call, repeats: int = 9) -> float:
    """By the clock, the least disturbed time: for what waits for other processes."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def communicate(rank: int, world: int, store: str, sizes) -> list[dict]:
    """What one process of the group does; every one returns the same sizes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rows = []
    for size in sizes:
        sums = torch.ones(size, dtype=torch.float64)

        def there_and_back(sums=sums):
            dist.reduce(sums, 0)
            dist.broadcast(sums, 0)

        rows.append(
            {
                "ranks": world,
                "doubles": size,
                "reduce_and_broadcast_s": shortest(there_and_back),
                "all_reduce_s": shortest(lambda sums=sums: dist.all_reduce(sums)),
            }
        )
    dist.destroy_process_group()
    return rows


def communication() -> list[dict]:
    rows = []
    for world in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "benchmarks.cost_measure",
                "--store",
                f"{folder}/store",
                "--world",
                str(world),
            ]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
            group = [
                subprocess.Popen([*command, "--rank", str(r)], env=environment, stdout=subprocess.PIPE, text=True)
                for r in range(world)
            ]
            said = [process.communicate()[0] for process in group]
        rows += json.loads(said[0])
    return rows


def noise(size: int = 10**6) -> dict:
    sums, spec = {torch.zeros(size): torch.zeros(size, dtype=torch.float64)}, NoiseSpec(1.0, 1.0, 64.0, 0.01)
    made = {"torch": TorchNoise(torch.Generator().manual_seed(0)), "secure": SecureNoise()}
    return {k: 1e9 * seconds(lambda v=v: release(sums, spec, v, lambda _: None), 5) / size for k, v in made.items()}


def parameters() -> list[dict]:
    """One example a step: the rest is θ, the sum in double, noise and update."""
    rows = []
    for width in (256, 512, 1024, 2048):
        torch.manual_seed(0)
        net = nn.Linear(width, width)
        data = TensorDataset(torch.randn(64, width), torch.randint(width, (64,)))
        step = private_step(net, data, IVON(net.parameters(), lr=0.1, ess=64), 2, lambda m, x: m(x))
        rows.append({"parameters": width * width + width, "s": seconds(step)})
    return rows


def private_step(net, data, optimizer, batch, call):
    """A function that makes one DP-IVON step on a fixed batch: sizes do not vary while they are measured."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    x, y = next(iter(loader))

    def step():
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(call(model, x), y).backward()
        optimizer.step()

    return step


def resident_kib(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1])


def transformer(kind: str, batch: int, repeats: int) -> dict:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000, n_positions=LENGTH, n_embd=WIDTH, n_layer=DEPTH, n_head=4, num_labels=2,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    net = GPT2ForSequenceClassification(config)
    if kind.endswith("lora"):
        lora = LoraConfig(task_type="SEQ_CLS", r=RANK, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        net = get_peft_model(net, lora)
    else:
        net.transformer.wpe.requires_grad_(
            False
        )  # GPT-2 looks positions up once for all examples: no per-example gradient
    trained = [p for p in net.parameters() if p.requires_grad]
    data = TensorDataset(torch.randint(1, 1000, (batch, LENGTH)), torch.randint(2, (batch,)))
    if kind.startswith("private"):
        step = private_step(
            net, data, IVON(trained, lr=0.1, ess=batch), batch, lambda model, x: model(input_ids=x).logits
        )
    else:
        optimizer, (x, y) = torch.optim.SGD(trained, lr=1e-3), data.tensors

        def step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(input_ids=x).logits, y).backward()
            optimizer.step()

    net.train()
    before = resident_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here, not at the largest import
    took = seconds(step, repeats)
    peak = resident_kib("VmHWM")
    sizes = {"parameters": sum(p.numel() for p in net.parameters()), "trained": sum(p.numel() for p in trained)}
    return {"kind": kind, "batch": batch, "s": took, "peak_kib": peak, "before_kib": before} | sizes


def transformers(repeats: int) -> dict:
    """Each in a process of its own, for its peak; the slope over two batches is what an example keeps."""
    rows = []
    for batch in (SMALL, LARGE):
        for kind in KINDS:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.cost_measure",
                "--transformer",
                f"{kind}:{batch}",
            ]
            done = subprocess.run([*command, "--repeats", str(repeats)], capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    units = LENGTH * WIDTH * DEPTH
    kept = {}
    for kind in KINDS:
        low, high = (r for r in rows if r["kind"] == kind)
        kept[kind] = 1024 * (high["peak_kib"] - low["peak_kib"]) / (high["batch"] - low["batch"]) / units
    took = {r["kind"]: r["s"] for r in rows if r["batch"] == LARGE}
    return {
        "sizes": {"tokens": LENGTH, "width": WIDTH, "layers": DEPTH, "adapter_rank": RANK},
        "rows": rows,
        "bytes_a_token_width_layer": kept,
        "private_over_plain": {k: took[f"private-{k}"] / took[f"plain-{k}"] for k in ("full", "lora")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--transformer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.store:
        print(json.dumps(communicate(given.rank, given.world, given.store, SIZES)))
        return
    if given.transformer:
        kind, batch = given.transformer.split(":")
        print(json.dumps(transformer(kind, int(batch), given.repeats)))
        return
    facts = {
        "command": " ".join(["python -m benchmarks.cost_measure", *sys.argv[1:]]),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, one thread a process",
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }
    for name, measure in (
        ("communication", communication),
        ("noise_ns", noise),
        ("parameters", parameters),
        ("transformer", lambda: transformers(given.repeats)),
    ):
        facts[name] = measure()
        print(name, json.dumps(facts[name]), flush=True)
    facts["load_after"] = os.getloadavg()[0]
    if given.json:
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
