"""The cost model of docs/scaling.md: constants from committed measurements, and what they say of larger models and more GPUs.

    python -m benchmarks.cost_model        # prints the tables of the page, writes benchmarks/results/cost-model.png

Every constant is fitted to a file of benchmarks/results or stands in ``ASSUMED``, and nothing here is measured. Where a fit has
points to spare it is held against them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import poisson

FOLDER = Path(__file__).parent / "results"
CNN = 357_258  # parameters of the paper's CNN

#: Nobody has measured these here: large products on one GPU, and two kinds of network between GPUs.
ASSUMED = {"flops": 400e12, "fast_bytes": 300e9, "slow_bytes": 40e9}
#: Private over plain steps where all is trained: assumed, above what captured steps on an H200 took.
PRIVATE_OVER_PLAIN_H200 = 2.5


@dataclass(frozen=True)
class Line:
    """y = base + slope · x through two points."""

    base: float
    slope: float

    @classmethod
    def through(cls, a: tuple[float, float], b: tuple[float, float]) -> Line:
        slope = (b[1] - a[1]) / (b[0] - a[0])
        return cls(a[1] - slope * a[0], slope)

    def __call__(self, x: float) -> float:
        return self.base + self.slope * x


def h200() -> dict[tuple[int, int], tuple[float, float]]:
    """(runs, batch) → seconds a step and peak bytes, of the paper's CNN."""
    text = (FOLDER / "stacked-h200-short.txt").read_text()
    rows = re.findall(r"K=\s*(\d+) b=\s*(\d+):\s*([\d.]+) ms.*peak ([\d.]+) GB", text)
    return {(int(k), int(b)): (1e-3 * float(ms), 2**30 * float(gb)) for k, b, ms, gb in rows}


@dataclass(frozen=True)
class Constants:
    """Seconds and bytes."""

    example: float  # of the paper's CNN on an H200, of 90 runs stacked
    parameter: float  # noise, θ and update, of the same
    example_bytes: float
    parameter_bytes: float
    floor: float  # of a step of one run
    ray_ratio: float  # of throughput through Ray and directly, where nobody else works
    fsync: float
    noise_cpu: float
    secure_cpu: float
    parameter_cpu: float
    loopback: float  # bytes a second there and back between two processes
    kept: dict[str, float]  # bytes a token, width and layer in fp32
    lora_ratio: float
    full_ratio: float


def constants() -> Constants:
    found, runs = h200(), 90
    time = Line.through(*((runs * b, found[runs, b][0]) for b in (128, 512)))
    room = Line.through(*((runs * b, found[runs, b][1]) for b in (128, 512)))
    data = 50_000 * 3 * 32 * 32 * 4
    cpu = json.loads((FOLDER / "cost-cpu.json").read_text())
    ray = json.loads((FOLDER / "ray-overhead-cpu.json").read_text())
    load = json.loads((FOLDER.parents[1] / "tests" / "reliability" / "load.json").read_text())
    largest = next(r for r in cpu["communication"] if r["ranks"] == 2 and r["doubles"] == 10**7)
    widths = cpu["parameters"]
    transformer = cpu["transformer"]
    return Constants(
        example=time.slope,
        parameter=time.base / (runs * CNN),
        example_bytes=room.slope,
        parameter_bytes=(room.base - data) / (runs * CNN),
        floor=found[1, 128][0] - time.slope * 128,
        ray_ratio=ray["median_ratios"]["training"] * ray["median_ratios"]["worker"],
        fsync=1e-3 * load["one_charge_on_this_disk"]["median_ms"],
        noise_cpu=1e-9 * cpu["noise_ns"]["torch"],
        secure_cpu=1e-9 * cpu["noise_ns"]["secure"],
        parameter_cpu=(widths[-1]["s"] - widths[0]["s"]) / (widths[-1]["parameters"] - widths[0]["parameters"]),
        loopback=2 * 8 * largest["doubles"] / largest["reduce_and_broadcast_s"],
        kept=transformer["bytes_a_token_width_layer"],
        lora_ratio=transformer["private_over_plain"]["lora"],
        full_ratio=transformer["private_over_plain"]["full"],
    )


def largest_part(batch: float, ranks: int) -> float:
    """E[max] of W independent Poisson(b/W): what the slowest rank has to do. Σ P(max > k) over k ≥ 0."""
    rate = batch / ranks
    counts = np.arange(int(rate + 20 * math.sqrt(rate) + 40))
    return float((1.0 - poisson.cdf(counts, rate) ** ranks).sum())


@dataclass(frozen=True)
class Transformer:
    """A decoder of L layers of width d on sequences of T tokens; adapters of rank r on all of its products if r."""

    layers: int = 22
    width: int = 2048
    tokens: int = 512
    batch: int = 1024
    rank: int = 0

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.width**2

    @property
    def trained(self) -> float:
        return 16.0 * self.layers * self.rank * self.width if self.rank else self.parameters

    def compute(self, c: Constants, examples: float) -> float:
        """Forward and input gradients are 4PT, weight gradients 2PT more where weights are trained."""
        flops = (4 if self.rank else 6) * self.parameters * self.tokens * examples
        return flops / ASSUMED["flops"] * (c.lora_ratio if self.rank else PRIVATE_OVER_PLAIN_H200)

    def kept_bytes(self, c: Constants, examples: int) -> float:
        """Activations in bf16: half of what was measured in fp32."""
        kind = "private-lora" if self.rank else "private-full"
        return c.kept[kind] / 2 * self.layers * self.width * self.tokens * examples


def step(t: Transformer, c: Constants, ranks: int, *, sharded: bool, network: str) -> dict[str, float]:
    """Seconds of a step of one model on W GPUs, by what they go to."""
    speed = ASSUMED[f"{network}_bytes"]
    parts = {
        "compute": t.compute(c, t.batch / ranks),
        "waiting": t.compute(c, largest_part(t.batch, ranks) - t.batch / ranks) if ranks > 1 else 0.0,
        "noise and update": c.parameter * t.trained / (ranks if sharded else 1),
        "ledger": c.fsync,
        "communication": 0.0,
    }
    if ranks > 1:  # sharded: sums once in double; weights twice in bf16. Replicated: doubles to the first rank and back
        parts["communication"] = (8 * t.trained + 4 * t.parameters if sharded else 16 * t.trained) / speed
    return parts


def efficiency(t: Transformer, c: Constants, ranks: int, **how) -> float:
    return sum(step(t, c, 1, sharded=False, network="fast").values()) / ranks / sum(step(t, c, ranks, **how).values())


def cnn_efficiency(c: Constants, ranks: int, batch: int = 512) -> float:
    """One run of the paper's CNN spread over W GPUs, without its communication: the floor alone decides."""
    alone = c.floor + c.example * batch
    return alone / ranks / (c.floor + c.example * largest_part(batch, ranks))


FULL, LORA = Transformer(), Transformer(rank=16)
WAYS = {
    "all 1.1 B, replicated": (FULL, {"sharded": False}),
    "all 1.1 B, sharded": (FULL, {"sharded": True}),
    "LoRA, 11.5 M of 1.1 B, replicated": (LORA, {"sharded": False}),
}


def checks(c: Constants) -> list[str]:
    """The fit against what it was not fitted to."""
    found, lines = h200(), []
    for runs, batch in ((90, 256), (1, 512)):
        said = c.example * runs * batch + (c.parameter * runs * CNN if runs > 1 else c.floor)
        seen = found[runs, batch][0]
        lines.append(
            f"| {runs} × b = {batch} | {1e3 * said:.2f} ms | {1e3 * seen:.2f} ms | {100 * (said / seen - 1):+.0f} % |"
        )
    cpu = json.loads((FOLDER / "scaling-cpu.json").read_text())["sweeps"]["batch"]
    seen = dict(zip(cpu["size"], cpu["ms"], strict=True))
    fit = Line.through((64, seen[64]), (512, seen[512]))
    for batch in (128, 256):
        said = fit(batch)
        lines.append(
            f"| two cores, b = {batch} | {said:.0f} ms | {seen[batch]:.0f} ms | {100 * (said / seen[batch] - 1):+.0f} % |"
        )
    return lines


def time_table(c: Constants) -> list[str]:
    lines = []
    for name, (t, how) in WAYS.items():
        for ranks, network in ((1, "fast"), (8, "fast"), (64, "fast"), (64, "slow")):
            if ranks == 1 and how["sharded"]:
                continue
            parts = step(t, c, ranks, network=network, **how)
            share = efficiency(t, c, ranks, network=network, **how)
            numbers = " | ".join(
                f"{1e3 * parts[k]:,.0f}" for k in ("compute", "waiting", "noise and update", "communication")
            )
            where = f"{ranks}" if ranks == 1 else f"{ranks}, {network}"
            lines.append(f"| {name} | {where} | {numbers} | {1e3 * sum(parts.values()):,.0f} | {100 * share:.0f} % |")
    return lines


def memory_table(c: Constants, examples: int = 8) -> list[str]:
    lines = []
    for name, (t, how) in WAYS.items():
        for ranks in (1, 64):
            if ranks == 1 and how["sharded"]:
                continue
            frozen = 2 * (t.parameters - t.trained) if t.rank else 0.0
            state = c.parameter_bytes * t.trained / (ranks if how["sharded"] else 1)
            kept = t.kept_bytes(c, examples)
            numbers = " | ".join(f"{x / 1e9:.1f}" for x in (frozen, state, kept, frozen + state + kept))
            lines.append(f"| {name} | {ranks} | {numbers} |")
    return lines


def constant_table(c: Constants) -> list[str]:
    kept, us, ns, ms = c.kept, 1e6, 1e9, 1e3
    stacked, core = "H200, 90 runs stacked", "one CPU core"
    example, parameter = f"{us * c.example:.3f} µs", f"{ns * c.parameter:.3f} ns"
    noise = f"{ns * c.noise_cpu:.0f} / {ns * c.secure_cpu:.0f} ns"
    rows = [
        ("an example of the paper's CNN, to its clipped sum", f"{example}, {c.example_bytes / 1e6:.2f} MB", stacked),
        ("a trained parameter: θ, noise, update", f"{parameter}, {c.parameter_bytes:.0f} bytes", stacked),
        ("a step of one run, however small", f"{ms * c.floor:.2f} ms", "H200, one run"),
        ("a trained parameter, whole eager step", f"{ns * c.parameter_cpu:.0f} ns", core),
        ("its noise, PyTorch's generator / the operating system's", noise, core),
        ("sums in double to the first rank and back, two ranks", f"{c.loopback / 1e9:.1f} GB/s", "gloo on loopback"),
        ("a release in the ledger, on disk", f"{ms * c.fsync:.2f} ms", "`benchmarks.ledger`"),
        ("throughput through Ray over directly, an estimate", f"{c.ray_ratio:.3f}", "two CPU cores"),
        ("kept a token, width and layer, fp32: plain / private", _pair(kept, "full"), "small GPT-2, all trained"),
        ("the same, LoRA", _pair(kept, "lora"), "small GPT-2"),
        ("a private step over a plain one, all / LoRA", f"{c.full_ratio:.1f} / {c.lora_ratio:.1f}", f"{core}, eager"),
    ]
    return [f"| {what} | {value} | {where} |" for what, value, where in rows]


def _pair(kept: dict[str, float], kind: str) -> str:
    return f"{kept[f'plain-{kind}']:.0f} / {kept[f'private-{kind}']:.0f} bytes"


def part_table() -> list[str]:
    rates = (8, 16, 64, 256, 1024)
    return [
        f"| {ranks} | " + " | ".join(f"{largest_part(rate * ranks, ranks) / rate:.2f}" for rate in rates) + " |"
        for ranks in (2, 8, 64)
    ]


def _shares(c: Constants, ranks: list[int], t: Transformer, sharded: bool, network: str) -> list[float]:
    return [efficiency(t, c, w, sharded=sharded, network=network) for w in ranks]


def draw(c: Constants, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2), dpi=150)
    found = h200()
    for runs, colour, label in ((90, "#0072B2", "90 runs stacked"), (1, "#D55E00", "one run")):
        points = sorted((k * b, 1e3 * s) for (k, b), (s, _) in found.items() if k == runs)
        left.plot(*zip(*points, strict=True), "o", color=colour, label=f"{label}, measured")
        base = c.parameter * runs * CNN if runs > 1 else c.floor
        xs = [2 ** (i / 4) for i in range(24, 65)]
        left.plot(xs, [1e3 * (base + c.example * x) for x in xs], "-", lw=1, color=colour, label=f"{label}, model")
    left.set(xscale="log", yscale="log", xlabel="examples a step, all runs", ylabel="ms a step")
    left.set_title("Measured: the paper's CNN on one H200", fontsize=10)
    left.legend(fontsize=8)
    ranks = [1, 2, 4, 8, 16, 32, 64]
    lines = [
        ("90-run stacks, one a GPU, by Ray", [c.ray_ratio for _ in ranks], "#009E73", "-"),
        ("LoRA, replicated, slow network", _shares(c, ranks, LORA, False, "slow"), "#0072B2", "-"),
        ("all 1.1 B, sharded, fast network", _shares(c, ranks, FULL, True, "fast"), "#CC79A7", "-"),
        ("all 1.1 B, replicated, fast network", _shares(c, ranks, FULL, False, "fast"), "#D55E00", "-"),
        ("all 1.1 B, replicated, slow network", _shares(c, ranks, FULL, False, "slow"), "#D55E00", "--"),
        ("one run of the CNN, b = 512", [cnn_efficiency(c, w) for w in ranks], "#999999", "-"),
    ]
    for label, ys, colour, style in lines:
        right.plot(ranks, ys, style, marker=".", color=colour, label=label)
    right.set(xscale="log", xlabel="GPUs", ylabel="share of perfect scaling", ylim=(0, 1.05))
    right.set_xticks(ranks, [str(w) for w in ranks])
    right.minorticks_off()
    right.set_title("Modelled, not measured: more GPUs", fontsize=10)
    right.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    c = constants()
    for title, lines in (
        ("constants", constant_table(c)),
        ("checks", checks(c)),
        ("time", time_table(c)),
        ("memory", memory_table(c)),
        ("largest part", part_table()),
    ):
        print(f"\n{title}", *lines, sep="\n")
    print(f"\nCNN, b = 512, 64 GPUs: {100 * cnn_efficiency(c, 64):.1f} % of perfect scaling")
    draw(c, FOLDER / "cost-model.png")


if __name__ == "__main__":
    main()
