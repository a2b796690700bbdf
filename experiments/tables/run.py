"""Train every cell of a plan, one process per core; rows are appended as they are finished, and finished ones are skipped.

python -m experiments.tables.run --plan every --jobs 16 --until 540 --table rows.csv --data carry/tables
python -m experiments.tables.run --sigmas     # noise multipliers by PLD, into sigmas.json, where dp-accounting is installed

``final`` has two arms per table and ε: "before", the network, bound, batch and length that the library had until now, and
"rule", those of ``dpivon.defaults``. In both each method's step size is tuned on validation data by one run each; the best
is then trained with five other seeds. The default itself, with the rule's own step size, is trained with the same five.
``every`` has four tables besides that no choice was made on. ``explore`` is a wider grid at one or two seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import NamedTuple

import torch

from dpivon.defaults import table_defaults
from experiments.leaderboard.priors.tables import facts
from experiments.tables.data import NAMES, UNSEEN, load
from experiments.tables.train import HIDDEN, Net, Spec, evaluate, train

EPSILONS = (1.0, 3.0, 0.5, 8.0)
ROWS = {"imbalanced": 5000, "nonlinear": 60_000, "cancer": 341, "categories": 10_000, "missing": 4000, "digits": 1078}
ROWS |= {"diabetes": 265, "wine": 107, "small": 400, "large": 100_000, **UNSEEN}
NETWORKS = {
    "linear3": (0, 3.0),
    "mlp3": (HIDDEN, 3.0),
    "mlp": (HIDDEN, 1.0),
}  # hidden units, what inputs are multiplied by
RATES = {
    "dp-steady": (0.25, 0.5, 1.0, 2.0, 3.5, 7.0),
    "dp-sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "dp-adam": (0.001, 0.003, 0.01, 0.03, 0.1),
    "dp-ivon-gradsq": (0.03, 0.1, 0.3, 1.0, 3.0),
}
BOUNDS = (1.0, 3.0, 10.0)
SEEDS = 5
SIGMAS = Path(__file__).parent / "sigmas.json"
KEYS = ("arm", "table", "epsilon", "network", "batch", "steps", "method", "lr", "bound", "seed", "iterate")
MADE = ("device", "torch", "commit")
SCORES = ("accuracy", "nll", "balanced_nll", "auc", "balanced_accuracy")
FIELDS = (*KEYS, *(f"{part}_{s}" for part in ("validation", "test") for s in SCORES), "sigma", "seconds", *MADE)


class Job(NamedTuple):
    arm: str
    table: str
    epsilon: float
    network: str
    batch: int
    steps: int
    seed: int  # the best of each method is trained with seeds 1 to 5 besides, where this is 0 and the arm is not "explore"
    specs: tuple[Spec, ...]

    @property
    def cost(self):
        """Roughly proportional to its time."""
        return self.steps * len(self.specs) * (200 + self.batch * (8 if NETWORKS[self.network][0] else 1) / 4)


def delta(n):
    return 1e-5 if n < 50_000 else 1e-6


def shapes(n):
    """(b, T): as the library had it (an eighth of the rows, 40 epochs), and large batches for few and for more steps."""
    old, large = max(16, min(1024, n // 8)), min(n, 2048)
    return [(old, 40 * math.ceil(n / old)), (large, 100), (large, 400)]


def explore():
    """Seed 0 of everything at ε = 1 and 3, then at the others, then seed 1."""
    specs = tuple(Spec(m, lr, c) for m, rates in RATES.items() for c in BOUNDS for lr in rates)
    for seed in (0, 1):
        for several in (EPSILONS[:2], EPSILONS[2:]):
            jobs = [
                Job("explore", table, epsilon, network, b, t, seed, specs)
                for table in NAMES
                for epsilon in several
                for network in NETWORKS
                for b, t in shapes(ROWS[table])[: 1 if network == "mlp" else None]
            ]
            yield from sorted(jobs, key=lambda job: -job.cost)  # the longest first, so that all cores end together


def final(tables=NAMES, epsilons=EPSILONS):
    """One job per arm, method, table and ε; the arm "before" comes last, and the longest first."""
    jobs = []
    for table in tables:
        for epsilon in epsilons:
            n = ROWS[table]
            rule = table_defaults(n, epsilon)
            steps = rule.epochs * math.ceil(n / rule.batch_size)
            new = ("mlp3" if rule.hidden else "linear3", rule.batch_size, steps)
            for method, rates in RATES.items():
                jobs += [
                    Job("before", table, epsilon, "mlp", *shapes(n)[0], 0, tuple(Spec(method, r, 1.0) for r in rates)),
                    Job("rule", table, epsilon, *new, 0, tuple(Spec(method, r, rule.max_grad_norm) for r in rates)),
                ]
            jobs.append(Job("default", table, epsilon, *new, 0, (Spec(rule.method, rule.lr, rule.max_grad_norm),)))
    return sorted(jobs, key=lambda job: (job.arm == "before", -job.cost))


def every():
    """``final``, and the same at two ε on tables that no choice was made on."""
    jobs = [*final(UNSEEN, EPSILONS[:2]), *final()]
    return sorted(jobs, key=lambda job: job.arm == "before")


PLANS = {"final": final, "every": every, "explore": explore}


def name_of(job):
    return f"{ROWS[job.table]} {job.batch} {job.steps} {job.epsilon:g}"


def noise(job, known):
    if (found := known.get(name_of(job))) is not None:
        return float(found)
    from dpivon.privacy.accounting import noise_multiplier

    n = ROWS[job.table]
    return noise_multiplier(job.epsilon, delta(n), min(1.0, job.batch / n), job.steps)


def key(row):
    texts = ("arm", "table", "network", "method", "iterate")
    return tuple(row[k] if k in texts else f"{float(row[k]):g}" for k in KEYS)


def work(given):
    """The rows of a job."""
    job, folder, known = given
    torch.set_num_threads(1)
    began = time.monotonic()
    parts, classes = load(folder, job.table)
    hidden, scale = NETWORKS[job.network]
    net = Net(parts["train"][0].shape[1], classes, hidden, scale)
    prior = torch.bincount(torch.cat([parts[p][1] for p in parts]), minlength=classes).double()
    sigma = noise(job, known)

    def rows(specs, seed):
        found = []
        for begin in range(0, len(specs), 13):  # so that activations stay near the core
            some = specs[begin : begin + 13]
            shape = {"batch": job.batch, "steps": job.steps, "seed": 1 + seed}
            for iterate, theta in zip(
                ("last", "average"), train(net, some, *parts["train"], sigma=sigma, **shape), strict=True
            ):
                for spec, row in zip(some, evaluate(net, theta, parts, prior / prior.sum()), strict=True):
                    own = dict(zip(KEYS, (*job[:6], *spec, seed, iterate), strict=True))
                    found.append(own | {k: round(v, 5) for k, v in row.items()} | {"sigma": round(sigma, 5)})
        return found

    found = rows(sorted(job.specs, key=lambda s: s.method), job.seed)
    if job.arm != "explore":
        alive = [row for row in found if not math.isnan(row["validation_balanced_nll"])]
        best = min(alive, key=lambda row: row["validation_balanced_nll"])
        for seed in range(1, 1 + SEEDS):
            found += rows([Spec(best["method"], best["lr"], best["bound"])], seed)
    seconds = round((time.monotonic() - began) / len(found), 3)
    return [row | {"seconds": seconds} | facts(torch.device("cpu")) for row in found]


def read(path):
    if not Path(path).is_file():
        return []
    with Path(path).open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["seconds"]]


def run(jobs, table, folder, processes, until):
    began = time.monotonic()
    done = {key(row) for row in read(table)}
    known = json.loads(SIGMAS.read_text()) if SIGMAS.is_file() else {}
    todo = []
    for job in jobs:
        left = tuple(
            s for s in job.specs if key(dict(zip(KEYS, (*job[:6], *s, job.seed, "average"), strict=True))) not in done
        )
        if left:
            todo.append(job._replace(specs=left))
    fresh = not Path(table).is_file()
    with Path(table).open("a", newline="") as file, multiprocessing.get_context("fork").Pool(processes) as pool:
        writer = csv.DictWriter(file, FIELDS)
        if fresh:
            writer.writeheader()
        several = pool.imap_unordered(work, ((job, folder, known) for job in todo), chunksize=1)
        for number in range(len(todo)):
            try:
                writer.writerows(several.next(timeout=max(0.1, until - (time.monotonic() - began))))
                file.flush()
            except multiprocessing.TimeoutError:
                print(f"time is up after {number} of {len(todo)} jobs", flush=True)
                pool.terminate()
                return
            if number % 20 == 0:
                print(f"{number + 1} of {len(todo)} jobs, {time.monotonic() - began:.0f} s", flush=True)
    print(f"all {len(todo)} jobs are done in {time.monotonic() - began:.0f} s", flush=True)


def calibrate(jobs):
    known = json.loads(SIGMAS.read_text()) if SIGMAS.is_file() else {}
    for job in {name_of(job): job for job in jobs}.values():
        if name_of(job) not in known:
            known[name_of(job)] = round(noise(job, known) * (1 + 1e-6), 6)
            SIGMAS.write_text(json.dumps(known, indent=1) + "\n")


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--plan", default="every", choices=PLANS)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--until", type=float, default=math.inf, help="seconds")
    arguments.add_argument("--table", type=Path, default=Path("rows.csv"))
    arguments.add_argument("--data", type=Path, default=Path("carry/tables"))
    arguments.add_argument("--sigmas", action="store_true")
    given = arguments.parse_args()
    jobs = list(PLANS[given.plan]())
    if given.sigmas:
        calibrate(jobs)
    else:
        run(jobs, given.table, given.data, given.jobs, given.until)


if __name__ == "__main__":
    main()
