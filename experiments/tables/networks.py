"""Residual networks, and a prior of random functions, for private training on tables.

    python -m experiments.tables.networks --data carry/tables      # results/networks.csv; what has rows is left out
    python -m experiments.tables.networks --report                 # their part of README.md

Every arm has the rule's b, T and C, and DP-Steady with a step size that seed 0 chose on validation rows; test scores are of
seeds 1 to 5. Where the rule takes a linear classifier, networks are trained besides, for 400 steps.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import cache
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn
from torch.nn import functional as F

from dpivon.defaults import table_defaults
from dpivon.privacy.accounting import epsilon, noise_multiplier
from experiments.leaderboard.priors import tables
from experiments.strong_privacy.compare.statistics import interval
from experiments.tables.data import load
from experiments.tables.run import RATES, SEEDS, delta
from experiments.tables.train import HIDDEN, Net, Residual, Spec, evaluate, train

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "networks.csv"
BEGIN, END = "<!-- made by python -m experiments.tables.networks --report -->\n", "<!-- end of networks -->\n"
MEASURED, EMBEDDED = {"categories": 4}, 8  # columns before the one-hot ones, and what these are mapped to
LEARN_STEPS, LEARN_ROWS, FUNCTIONS, RIDGE = 1000, 1024, 60, 0.01
STUDIES = {
    "residual": (("nonlinear", "large", "categories", "friedman", "wide"), (1.0, 3.0, 8.0), ("residual", "embedding")),
    "prior": (("nonlinear", "friedman", "large", "imbalanced", "mixed"), (0.5, 1.0, 3.0), ("zero", "start", "prior")),
}
PAIRS = {
    "residual": (("residual", "mlp"), ("residual", "linear"), ("embedding", "residual"), ("embedding", "linear")),
    "prior": (("start", "mlp"), ("prior", "mlp"), ("start", "zero"), ("prior", "start"), ("start", "linear")),
}
SHOWN = {"residual": (("residual", "mlp"),), "prior": (("start", "mlp"), ("prior", "mlp"))}
SMALLER = {
    "imbalanced": (0.03, 0.1),
    "mixed": (0.03, 0.1),
    "categories": (0.03, 0.1),
}  # networks chose the grid's least
SCORES = {"balanced_nll": "balanced NLL", "auc": "AUC", "balanced_accuracy": "balanced accuracy"}
COLUMNS = (
    *("table", "epsilon", "arm", "lr", "seed", "batch", "steps", "max_grad_norm", "sigma", "delta", "epsilon_spent"),
    *("validation_balanced_nll", *(f"test_{score}" for score in SCORES), "seconds", "device", "torch", "commit"),
)


# ---- a prior of random functions


def columns(rows, features, g):
    """Rows as :class:`dpivon.models.TableMLP` sees them: normal, uniform and yes/no columns, in random proportions."""
    shares = torch.rand(3, generator=g).clamp_min(1e-3).log().neg()
    kind = torch.multinomial(shares, features, replacement=True, generator=g)
    uniform = torch.rand(rows, features, generator=g)
    normal = torch.randn(rows, features, generator=g).mul(0.75).clamp(-3, 3)
    yes = 3.0 * (uniform < 0.05 + 0.9 * torch.rand(features, generator=g))
    return torch.where(kind == 0, normal, torch.where(kind == 1, 6 * uniform - 3, yes))


def functions(x, count, g):
    """Labels ±1 [rows, count] of random functions: each is of 1 to 6 columns, cut at a random quantile.

    A third are networks of eight units tanh, a third of eight sines (smooth, as of a Gaussian process), and a third sums of
    eight trees, each a product of two cuts.
    """
    features = x.shape[1]
    order = torch.rand(count, features, generator=g).argsort(1).argsort(1)
    some = torch.randint(1, 7, (count, 1), generator=g).clamp(max=features)
    chosen = (order < some).float() / some.sqrt()
    w = torch.randn(2, count, 8, features, generator=g) * chosen.unsqueeze(1)
    cut = torch.randn(2, count, 8, generator=g)
    a, b = (torch.einsum("nf,cuf->ncu", x, v) + c for v, c in zip(w, cut, strict=True))
    kind = (torch.arange(count) % 3).view(1, -1, 1)
    units = torch.where(kind == 0, a.tanh(), torch.where(kind == 1, a.sin(), (a > 0).float() * (b > 0)))
    score = torch.einsum("ncu,cu->nc", units, torch.randn(count, 8, generator=g))
    score = score + 1e-4 * torch.randn(score.shape, generator=g)  # ties fall either way
    quantiles = 0.2 + 0.6 * torch.rand(count, generator=g)
    place = score.argsort(0).argsort(0) / len(x)
    return (place > quantiles).float() * 2 - 1


@cache
def learned(features, seed, steps):
    """A hidden layer (weight, bias) from which a ridge regression predicts new random functions; it reads no data set."""
    g = torch.Generator().manual_seed(10_000 + seed)
    w, b = Net(features, 2, HIDDEN, 3.0).parts(Net(features, 2, HIDDEN, 3.0).start(seed)[None])[:2]
    w, b = nn.Parameter(w[0].clone()), nn.Parameter(b[0].clone())
    optimizer = torch.optim.Adam([w, b], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    half, losses = LEARN_ROWS // 2, []
    for _ in range(steps):
        x = columns(LEARN_ROWS, features, g)
        y = functions(x, FUNCTIONS, g)
        h = F.pad((x @ w.T + b).tanh(), (0, 1), value=1.0)
        gram = h[:half].T @ h[:half] / half + RIDGE * torch.eye(HIDDEN + 1)
        head = torch.linalg.solve(gram, h[:half].T @ y[:half] / half)
        loss = (h[half:] @ head - y[half:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    first, last = fmean(losses[: 1 + steps // 20]), fmean(losses[-1 - steps // 20 :])
    print(f"prior of {features} columns, seed {seed}: squared error {first:.3f} → {last:.3f}", flush=True)
    return w.detach(), b.detach()


class Started(Net):
    """An MLP whose head begins at zero, and whose hidden layer was learned if ``steps`` is not 0."""

    steps = 0

    def start(self, seed):
        theta = super().start(seed)
        theta[-self.classes * (self.hidden + 1) :] = 0.0
        if self.steps:
            hidden = torch.cat([p.flatten() for p in learned(self.features, seed, self.steps)])
            theta[: len(hidden)] = hidden
        return theta

    def prior(self, seed):
        """μ and v: the start, and the mean square of each tensor; of the head, that of torch's initialisation."""
        pieces = [p.flatten() for p in self.parts(self.start(seed)[None])]
        sizes = [float(p.square().mean()) or 1 / (3 * self.hidden) for p in pieces]
        return torch.cat(pieces), torch.cat([torch.full_like(p, v) for p, v in zip(pieces, sizes, strict=True)])


# ---- runs


def network(arm, table, features, classes, learn):
    if arm in ("residual", "embedding"):
        more = {"measured": MEASURED[table], "embedded": EMBEDDED} if arm == "embedding" else {}
        return Residual(features, classes, **more)
    kind = Net if arm in ("linear", "mlp") else Started
    net = kind(features, classes, 0 if arm == "linear" else HIDDEN, 3.0)
    if arm in ("start", "prior"):
        net.steps = learn
    return net


def cells(studies, only, budgets):
    """(table, ε, arm), each once; ``embedding`` is of tables with one-hot columns."""
    found = {}
    for study in studies:
        names, epsilons, arms = STUDIES[study]
        for table in names if only is None else only:
            for eps in epsilons if budgets is None else budgets:
                for arm in ("linear", "mlp", *arms):
                    if arm != "embedding" or table in MEASURED:
                        found[table, eps, arm] = None
    return list(found)


def run(table, eps, arm, given, done):
    """The rows of an arm that are missing: step sizes by seed 0, then the best by validation rows with other seeds."""
    parts, classes = load(given.data, table)
    n = len(parts["train"][0])
    rule = table_defaults(n, eps)
    if arm == "linear" and rule.hidden:
        return
    passes = math.ceil(n / rule.batch_size)
    steps = passes * (rule.epochs if rule.hidden or arm == "linear" else max(1, round(400 / passes)))
    steps, rate = min(steps, given.steps or steps), min(1.0, rule.batch_size / n)
    net = network(arm, table, parts["train"][0].shape[1], classes, given.learn)
    share = torch.bincount(torch.cat([y for _, y in parts.values()]), minlength=classes).double()
    cell = (table, f"{eps:g}", arm)

    @cache
    def privacy():
        sigma = noise_multiplier(eps, delta(n), rate, steps)
        return sigma, epsilon([(sigma, rate, steps)], delta(n))

    def rows(rates, seed):
        missing = [r for r in rates if (*cell, f"{r:g}", str(seed)) not in done]
        if missing:
            began, (sigma, spent) = time.monotonic(), privacy()
            specs = [Spec("dp-steady", r, rule.max_grad_norm) for r in missing]
            shape = {"batch": rule.batch_size, "steps": steps, "seed": 1 + seed, "prior": arm == "prior"}
            theta = train(net, specs, *parts["train"], sigma=sigma, **shape)[1]
            about = {"batch": rule.batch_size, "steps": steps, "max_grad_norm": rule.max_grad_norm, "delta": delta(n)}
            about |= {"sigma": f"{sigma:.5f}", "epsilon_spent": f"{spent:.4f}", "seed": str(seed)}
            found = evaluate(net, theta, parts, share / share.sum())
            about |= {
                "seconds": round((time.monotonic() - began) / len(missing), 2),
                **tables.facts(torch.device("cpu")),
            }
            new = [
                dict(zip(COLUMNS[:4], (*cell, f"{r:g}"), strict=True))
                | {k: f"{v:.5f}" for k, v in scores.items() if k in COLUMNS}
                | about
                for r, scores in zip(missing, found, strict=True)
            ]
            tables.append(given.table, new, COLUMNS)
            done.update(((*cell, row["lr"], row["seed"]), row) for row in new)
        return [done[*cell, f"{r:g}", str(seed)] for r in rates]

    best = chosen(rows(given.rates or (*SMALLER.get(table, ()), *RATES["dp-steady"]), 0))
    for seed in range(1, 1 + given.seeds):
        rows((float(best["lr"]),), seed)


def chosen(rows):
    """The row with the best validation score; a run that diverged has none."""
    alive = [row for row in rows if not math.isnan(float(row["validation_balanced_nll"]))]
    return min(alive, key=lambda row: float(row["validation_balanced_nll"]))


# ---- the page


def scores_of(rows):
    """{(table, ε, arm): {score: by seed}} on test rows, of the chosen step size."""
    found, arms = {}, {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        arms.setdefault((row["table"], float(row["epsilon"]), row["arm"]), []).append(row)
    for cell, own in arms.items():
        best = chosen(row for row in own if row["seed"] == "0")["lr"]
        some = [row for row in own if row["seed"] != "0" and row["lr"] == best]
        found[cell] = {score: [float(row[f"test_{score}"]) for row in some] for score in SCORES}
    return found


def differences(found, table, eps, pair):
    """{score: interval of the paired difference}, None where an arm lacks seeds."""
    a, b = (found.get((table, eps, arm)) for arm in pair)
    if not a or not b or not len(a["auc"]) == len(b["auc"]) > 0:
        return None
    return {s: interval([x - y for x, y in zip(a[s], b[s], strict=True)]) for s in SCORES}


def page(rows):
    found, lines = scores_of(rows), []
    lines += ["| | cells | " + " | ".join(SCORES.values()) + " |", "|---|---|---|---|---|"]
    for study, (names, epsilons, _) in STUDIES.items():
        for pair in PAIRS[study]:
            some = [d for t in names for e in epsilons if (d := differences(found, t, e, pair))]
            texts = []
            for score in SCORES if some else ():
                sign = -1 if score == "balanced_nll" else 1
                better = sum(min(sign * d[score].low, sign * d[score].high) > 0 for d in some)
                worse = sum(max(sign * d[score].low, sign * d[score].high) < 0 for d in some)
                texts.append(f"{median(d[score].mean for d in some):+.4f}; {better} better, {worse} worse")
            if some:
                lines.append(f"| {pair[0]} − {pair[1]} | {len(some)} | " + " | ".join(texts) + " |")
    heads = "| table | ε | linear | mlp | difference | " + " | ".join(SCORES.values()) + " |"
    for study, (names, epsilons, _) in STUDIES.items():
        lines += ["", heads, "|---|---|---|---|---|---|---|---|"]
        for table, eps, pair in ((t, e, p) for t in names for e in epsilons for p in SHOWN[study]):
            if own := differences(found, table, eps, pair):
                arms = [found.get((table, eps, arm)) for arm in ("linear", "mlp")]
                nll = " | ".join(f"{fmean(arm['balanced_nll']):.4f}" if arm else "" for arm in arms)
                texts = " | ".join(f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]" for d in own.values())
                lines.append(f"| {table} | {eps:g} | {nll} | {pair[0]} − {pair[1]} | {texts} |")
    return "\n".join(lines) + "\n"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("carry/tables"))
    parser.add_argument("--table", type=Path, default=RESULTS, help="the CSV of rows")
    parser.add_argument("--study", nargs="*", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--tables", nargs="*", help="instead of the study's")
    parser.add_argument("--epsilons", nargs="*", type=float, help="instead of the study's")
    parser.add_argument("--rates", nargs="*", type=float, help="instead of the grid's")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=0, help="at most so many")
    parser.add_argument("--learn", type=int, default=LEARN_STEPS, help="steps of learning a prior")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which no cell is begun")
    parser.add_argument("--report", action="store_true", help="write README.md instead")
    given = parser.parse_args(arguments)
    if given.report:
        readme = HERE / "README.md"
        before, after = readme.read_text().split(BEGIN)
        readme.write_text(before + BEGIN + "\n" + page(tables.read(given.table)) + "\n" + END + after.split(END)[1])
        return
    torch.set_num_threads(1)
    began, done = time.monotonic(), {tuple(row[k] for k in COLUMNS[:5]): row for row in tables.read(given.table)}
    for cell in cells(given.study, given.tables, given.epsilons):
        if time.monotonic() - began < given.until:
            run(*cell, given, done)
            print(*cell, f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
