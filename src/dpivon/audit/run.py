"""The audit of a model on one path, all that came of it, and the loop over paths of ``dpivon audit``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpivon.audit.distributed_session import can_fork, check_forks
from dpivon.audit.probes import probe
from dpivon.audit.session import PATHS, STACK_PATHS, Check, Finding, Loss, MakeOptimizer, Subject, check_path, unknown
from dpivon.audit.tier_a import TIER_A
from dpivon.audit.tier_b import TIER_B
from dpivon.audit.tier_c import SIGMAS, TIER_C, Audited, one_run, own_model, plain, single_releases
from dpivon.errors import bad, check_whole
from dpivon.import_paths import imported
from dpivon.stacked.networks import cross_entropy
from dpivon.stacked.run import stackable

CHECKS: list[Check] = [*TIER_A, *TIER_B, *TIER_C]
EXAMPLES = 64  # of a data set that are looked at
OWN_GUESSES = 1000


@dataclass(frozen=True)
class Audit:
    """Findings of the checks and lower bounds on ε, for one path. Made by :func:`dpivon.audit`; ``print`` shows it.

    Attributes:
        path: how gradients were clipped, such as ``"bookkeeping"``.
        method: what was trained.
        model: the model's type.
        parameters: how many weights it has.
        findings: what each check found.
        audited: lower bounds on ε beside the claimed one.
        seconds: how long it took.
    """

    path: str
    method: str
    model: str
    parameters: int
    findings: list[Finding]
    audited: list[Audited] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """What does not hold; empty for a sound path."""
        checks = [f"{f.check}: {f.detail}" for f in self.findings if f.holds is False]
        bounds = [
            f"{a.attack} at σ = {a.sigma:g}: audited ε ≥ {a.audited:.2f} above the claimed {a.claimed:.2f}"
            for a in self.audited
            if not a.holds
        ]
        return checks + bounds

    @property
    def holds(self) -> bool:
        """Whether nothing was found against the guarantee. It is not thereby proved."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self) | {"holds": self.holds}

    def write(self, out: Any) -> None:
        """``audit.json``, ``audit.png`` and the one-page ``audit.html`` in the folder ``out``."""
        from dpivon.audit.page import write

        write([self], out)

    def __str__(self) -> str:
        lines = [
            f"{self.path}, {self.method}, {self.model} ({self.parameters} parameters): {'holds' if self.holds else 'FAILS'}"
        ]
        mark = {True: "ok", False: "FAILED", None: "n/a"}
        lines += [f"  {mark[f.holds]:>6}  {f.check}: {f.detail}" for f in self.findings]
        lines += [
            f"          {a.attack}, σ = {a.sigma:g}: ε ≥ {a.audited:.2f}, claimed {a.claimed:.2f}" for a in self.audited
        ]
        return "\n".join(lines)


def audit(
    model: nn.Module,
    data: tuple[Tensor, Tensor] | Dataset[Any],
    *,
    method: str | MakeOptimizer = "dp-ivon-gradsq",
    path: str = "bookkeeping",
    loss: Loss = cross_entropy,
    quick: bool = False,
    seed: int = 0,
    views: int = 1,
    autocast: bool = False,
    rows_per_user: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Audit:
    """Look for signs that private training of this model, by this method on this path, is not as private as it says.

    >>> report = dpivon.audit(model, (inputs, labels), method="dp-sgd", path="alone")
    >>> assert report.holds, report.failures
    >>> report.write("audit-output")

    An audit can refute a guarantee and cannot prove one. It reads some of the data and publishes nothing of them, but what
    it prints about sums is not private: run it on public or made-up data.

    Args:
        model: the network; it is copied, and never trained itself.
        data: inputs and labels, or a data set of such pairs, of which the first 64 are used.
        method: a name of ``dpivon methods``, or a function that makes an optimizer for a model.
        path: ``"bookkeeping"``; ``"alone"``, as if no layer had a rule, so that each runs example by example;
            ``"distributed"``, book-keeping on two processes; ``"stacked"`` or ``"captured"``; ``"compiled"``, the recorded
            program of ``engine.compile``, noise and update included.
        loss: ``loss(outputs, labels)`` gives one loss per example.
        quick: one bound on ε instead of a curve, and no canary in the model itself: seconds instead of a minute.
        seed: of all randomness in the audited runs.
        views: several of every example, averaged before clipping; all alike, so that what they must give is known.
        autocast: make every step inside bf16 autocast, as a caller may who wants speed.
        rows_per_user: audit privacy per person: examples are people who have from one to so many rows, all alike.
        progress: called with the name of each check before it runs.
    """
    inputs, labels = _take(data)
    views = check_whole("views", views, "Use 1 for the example itself", at_least=1)
    most = check_whole("rows_per_user", rows_per_user, "Use 1 where the unit of privacy is the row", at_least=1)
    subject = Subject(model, inputs, labels, method, path, loss, seed, views, autocast, most)
    if path == "distributed":
        check_forks(path)
    begun, tell = time.perf_counter(), progress or (lambda name: None)
    state = torch.random.get_rng_state()
    findings: list[Finding] = []
    try:
        for check in (*TIER_A, *TIER_B, *(TIER_C[:1] if quick else ())):
            tell(f"{check.tier}: {check.name}")
            findings.append(check(subject))
        audited = [] if quick else _curve(subject, tell)
    finally:
        torch.random.set_rng_state(state)
    size = sum(p.numel() for p in subject.trained())
    spent = round(time.perf_counter() - begun, 1)
    how = [path, *([f"{views} views"] if views > 1 else [])]
    how += ["autocast"] if autocast else []
    how += [f"people of up to {most} rows"] if most > 1 else []
    return Audit(", ".join(how), subject.name, type(model).__name__, size, findings, audited, spent)


def _curve(subject: Subject, tell: Callable[[str], None]) -> list[Audited]:
    out: list[Audited] = []
    for sigma in SIGMAS if plain(subject) else ():
        tell(f"C: canaries in single releases, σ = {sigma:g}")
        out.append(single_releases(subject, sigma))
    tell("C: canaries in one training run")
    out.append(one_run(subject, 1.0))
    if plain(subject) and not unknown(subject):
        tell("C: a canary in the model itself")
        out.append(own_model(subject, 1.0, OWN_GUESSES))
    return out


def _take(data: tuple[Tensor, Tensor] | Dataset[Any]) -> tuple[Tensor, Tensor]:
    """The first examples as two tensors."""
    if isinstance(data, tuple | list):
        if len(data) != 2 or not all(isinstance(t, Tensor) for t in data):
            raise bad("data", type(data).__name__, "is not a pair of tensors", "Give (inputs, labels)")
        return data[0][:EXAMPLES], data[1][:EXAMPLES]
    try:
        rows: Sequence[Any] = [data[i] for i in range(min(EXAMPLES, len(data)))]  # type: ignore[arg-type]
        return torch.stack([torch.as_tensor(x) for x, _ in rows]), torch.stack([torch.as_tensor(y) for _, y in rows])
    except (TypeError, ValueError, RuntimeError) as error:
        raise bad(
            "data", type(data).__name__, f"cannot be stacked ({error})", "Give (inputs, labels) as two tensors"
        ) from error


# ---- dpivon audit


def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network and scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, torch.tensor(x[:64], dtype=torch.float32) / 16.0, torch.tensor(y[:64])


def small() -> tuple[nn.Module, Tensor, Tensor]:
    """A few parameters, a layer of which is used twice."""
    subject = probe("bookkeeping", "dp-sgd")
    return subject.model, subject.inputs, subject.labels


MODELS = {"digits": digits, "small": small}


def load(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """One of ours, or what a function of the user's own returns: (model, inputs, labels)."""
    if name in MODELS:
        return MODELS[name]()
    fix = f"Use one of {', '.join(MODELS)}, or package.module:function that returns (model, inputs, labels)"
    made: Any = imported("model", name, fix)()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise bad("model", name, "did not return (model, inputs, labels)", fix)
    return made


def audit_paths(out: Path, *, model: str, method: str, paths: list[str], quick: bool, say: Any) -> bool:
    """Audit on every path, print what was found, write the report; whether everything holds."""
    for path in paths:
        check_path(path)
    out.mkdir(parents=True, exist_ok=True)  # before minutes of work, not after
    network, inputs, labels = load(model)
    here = [p for p in PATHS if (can_fork() or p != "distributed") and (p not in STACK_PATHS or method in stackable())]
    audits: list[Audit] = []
    for i, path in enumerate(paths or here):  # each with noise of its own, so that they are so many trials
        audits.append(audit(network, (inputs, labels), seed=100 * i, method=method, path=path, quick=quick))
        say(str(audits[-1]))
    from dpivon.audit.page import write

    write(audits, out)
    say(f"report in {out / 'audit.html'}")
    return all(a.holds for a in audits)
