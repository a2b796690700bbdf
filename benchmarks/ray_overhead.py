"""What Ray costs a study: stacks scheduled through it against the same stacks trained directly, in turn, on one machine.

    python -m benchmarks.ray_overhead --json results/benchmarks/ray-overhead-cpu.json

Equal stacks, one at a time, by the local engine in this process and by one Ray worker. Throughput is over the time from the
first stack's row to the last stack's: whole cycles of handing out, training, evaluating, bringing back and writing, without the
start of either. The share of that time in which a stack was training is stated too: between neighbours on a busy machine its ratio
varies less than that of throughput. What starting Ray and its processes takes (they import torch) is stated by itself. The two alternate, because a
shared machine drifts; a ratio is of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from dpivon.study import runner
from dpivon.study.cluster import engine
from dpivon.study.cluster.start import connected
from dpivon.study.plan import Plan, PlannedRun, steps_of
from dpivon.study.settings import Cluster, Settings

EXAMPLES = 1497  # training digits
ONE = Cluster(workers=1)


def plan(stacks: int, epochs: int) -> Plan:
    runs = tuple(PlannedRun("dp-ivon-gradsq", 128, 1.0, 1.0, seed, 0.5) for seed in range(stacks))
    return Plan("ray-overhead", "digits", "small", "final", epochs, 1e-4, 2, 0, runs)


def timed(run, module, study: Plan, settings: Settings) -> dict:
    """Examples a second between the first row and the last, the share of it that was training, and the seconds before."""
    at, busy, write = [], [], module.record

    def record(out, plan, results):
        write(out, plan, results)
        at.append(time.perf_counter())
        busy.append(sum(row["seconds"] for row in results.rows))

    module.record = record
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(study, Path(folder) / "out", settings)
    finally:
        module.record = write
    assert outcome.finished == len(study.runs)
    trained = sum(steps_of(r, study.epochs, EXAMPLES) * r.batch_size for r in study.runs[1:])
    window = at[-1] - at[0]
    return {"examples_per_s": trained / window, "busy": sum(busy[1:]) / window, "first_row_s": at[0] - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stacks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=15, help="of a stack: longer stacks hide more of the cost")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    study, settings = plan(given.stacks, given.epochs), Settings(device="cpu", quiet=True)
    rounds: list[dict] = []
    began = time.perf_counter()
    with connected(ONE, 0):
        start = time.perf_counter() - began
        for number in range(given.rounds):
            pair = {
                "direct": lambda: timed(runner.run_study, runner, study, settings),
                "ray": lambda: timed(lambda *a: engine.run_on_ray(*a, ONE), engine, study, settings),
            }
            order = list(pair) if number % 2 == 0 else list(pair)[::-1]
            found = {name: pair[name]() for name in order} | {"load": os.getloadavg()[0]}
            found["ratio"] = found["ray"]["examples_per_s"] / found["direct"]["examples_per_s"]
            found["busy_ratio"] = found["ray"]["busy"] / found["direct"]["busy"]
            rounds.append(found)
            print(
                f"direct {found['direct']['examples_per_s']:8,.0f}/s   ray {found['ray']['examples_per_s']:8,.0f}/s   "
                f"ratio {found['ratio']:.3f}   of busy time {found['busy_ratio']:.3f}   load {found['load']:.1f}", flush=True,
            )  # fmt: skip
    ratio = statistics.median(r["ratio"] for r in rounds)
    seconds = (
        steps_of(study.runs[0], study.epochs, EXAMPLES)
        * 128
        / statistics.median(r["direct"]["examples_per_s"] for r in rounds)
    )
    busy = statistics.median(r["busy_ratio"] for r in rounds)
    print(
        f"median ratio {ratio:.3f}, of busy time {busy:.3f}; a stack takes {seconds:.1f} s directly; Ray itself starts in {start:.1f} s"
    )
    if given.json:
        import ray

        facts = {
            "command": " ".join(["python -m benchmarks.ray_overhead", *sys.argv[1:]]),
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores, one thread a worker",
            "torch": torch.__version__,
            "ray": ray.__version__,
            "median_ratio": ratio,
            "median_busy_ratio": busy,
            "stack_seconds": seconds,
            "ray_start_seconds": start,
            "rounds": rounds,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
