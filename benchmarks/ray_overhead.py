"""What Ray costs a study: stacks scheduled through it against the same stacks trained directly, in turn, on one machine.

    python -m benchmarks.ray_overhead --json benchmarks/results/ray-overhead-cpu.json

Equal stacks, one at a time, by the local engine in this process and by one Ray worker, from the first stack's row to the last
stack's: whole cycles of handing out, training, evaluating, bringing back and writing, without the start of either. Ratios,
Ray's over direct, of neighbours in turn:

throughput   examples a second by the clock. The aim, on a machine of one's own; where others work it says more about them,
             since Ray's processes are a session of their own, which Linux gives a share of its own
training     the share of that time in which a stack was training: below 1, a worker waits for the driver
worker       examples a processor second of the process that trains: below 1, Ray's threads and reports take from it
everything   the same with all that Ray runs counted. Its daemons take a little of every second, so a crowded machine, where
             an example takes longer by the clock, makes it look worse
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from dpivon.study.cluster import engine
from dpivon.study.cluster.engine import connected
from dpivon.study.plan.plan import Plan, PlannedRun, steps_of
from dpivon.study.run import runner
from dpivon.study.run.settings import Cluster, Settings

EXAMPLES = 1497  # training digits
ONE = Cluster(workers=1)


def plan(stacks: int, epochs: int) -> Plan:
    runs = tuple(PlannedRun("dp-ivon-gradsq", 128, 1.0, 1.0, seed, 0.5) for seed in range(stacks))
    return Plan("ray-overhead", "digits", "small", "final", epochs, 1e-4, 2, 0, runs)


def processor_seconds() -> dict[int, float]:
    """Of this process and of all that descend from it, by process."""
    used, parent = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            pid = int(stat.parts[2])
            parent[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mine = {os.getpid()}
    while more := {pid for pid, above in parent.items() if above in mine} - mine:
        mine |= more
    return {pid: used[pid] for pid in mine}


def timed(run, module, study: Plan, settings: Settings) -> dict:
    at, used, busy, write = [], [], [], module.record

    def record(out, plan, results):
        write(out, plan, results)
        at.append(time.perf_counter())
        used.append(processor_seconds())
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
    window, me = at[-1] - at[0], os.getpid()
    took = {pid: end - used[0].get(pid, 0.0) for pid, end in used[-1].items()}
    worker = max((s for pid, s in took.items() if pid != me), default=0.0) if module is engine else took[me]
    return {
        "throughput": trained / window,
        "training": sum(busy[1:]) / window,
        "worker": trained / worker,
        "everything": trained / (sum(took.values()) if module is engine else took[me]),
        "first_row_s": at[0] - began,
    }


RATIOS = ("throughput", "training", "worker", "everything")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stacks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10, help="of a stack: longer stacks hide more of the cost")
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
                "ray": lambda: timed(lambda *a: runner.run_with("ray", *a, ONE), engine, study, settings),
            }
            order = list(pair) if number % 2 == 0 else list(pair)[::-1]
            found = {name: pair[name]() for name in order} | {"load": os.getloadavg()[0]}
            found["ratios"] = {name: found["ray"][name] / found["direct"][name] for name in RATIOS}
            rounds.append(found)
            words = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found["ratios"].items())
            print(f"{words}; direct {found['direct']['throughput']:,.0f}/s; load {found['load']:.1f}", flush=True)
    medians = {name: statistics.median(r["ratios"][name] for r in rounds) for name in RATIOS}
    work = steps_of(study.runs[0], study.epochs, EXAMPLES) * study.runs[0].batch_size
    seconds = work / statistics.median(r["direct"]["throughput"] for r in rounds)
    words = ", ".join(f"{name} {ratio:.3f}" for name, ratio in medians.items())
    print(f"medians: {words}; a stack takes {seconds:.1f} s; Ray starts in {start:.1f} s")
    if given.json:
        import ray

        facts = {
            "command": " ".join(["python -m benchmarks.ray_overhead", *sys.argv[1:]]),
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores, one thread a worker",
            "torch": torch.__version__,
            "ray": ray.__version__,
            "median_ratios": medians,
            "stack_seconds": seconds,
            "ray_start_seconds": start,
            "rounds": rounds,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
