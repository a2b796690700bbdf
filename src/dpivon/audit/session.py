"""What is audited and what a check says of it; a private run as an auditor sees it: batches in, what the optimizer gets out.

Beside it stands the clipped sum as the definition has it, which shares no code with the library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import bad, check_choice
from dpivon.methods import METHODS
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.stacked.networks import cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]
Verdict = tuple[bool | None, str]

#: Ways from a batch to a release: book-keeping by the layers' rules, the same with layers that have none and run example by
#: example, on two processes, two of a stack of runs ("captured" is the traced, padded program), and the recorded program of
#: ``engine.compile``, noise and update included.
STACK_PATHS = ("stacked", "captured")
PATHS = ("bookkeeping", "alone", "distributed", *STACK_PATHS, "compiled")
#: Those that can average over views.
VARIED_PATHS = ("bookkeeping", "alone", *STACK_PATHS, "compiled")
#: Those that can have people as the unit of privacy, and an audit of it.
PEOPLE_PATHS = ("bookkeeping", "alone", "compiled")
#: Opacus's names for ways to compute gradients.
MODES = ("hooks", "functorch", "ew", "ghost")


def check_path(path: Any) -> None:
    """Refuse what is not a path."""
    if path in MODES:
        raise bad("path", path, "is not a path: every grad_sample_mode means book-keeping", "Use path='bookkeeping'")
    check_choice("path", path, PATHS, "Choose a way to compute clipped sums")


@dataclass(frozen=True)
class Setting:
    """The public constants of a run under audit. ``batch`` is b, and q = b/N."""

    sigma: float = 1.3
    bound: float = 0.7
    size: int = 13
    batch: float = 13.0
    lr: float | None = None
    seed: int = 0
    runs: int = 1
    ladder: bool = False  # whether run k of a stack has noise (k + 1)σ
    twins: bool = False  # whether the runs of a stack are one run, several times
    mc_samples: int = 1

    @property
    def rate(self) -> float:
        return self.batch / self.size

    def but(self, **changes: Any) -> Setting:
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model as the user brings it. ``loss(outputs, labels)`` gives one loss per example.

    ``method`` is a name of ``dpivon methods``, or a function that makes an optimizer for a model. The model itself is
    never trained: every run of the audit gets a copy.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    method: str | MakeOptimizer = "dp-ivon-gradsq"
    path: str = "bookkeeping"
    loss: Loss = cross_entropy
    seed: int = 0  # of all randomness in its runs
    views: int = 1  # of every example, all alike, so that their mean is what one of them gives
    autocast: bool = False  # whether all of a step is made inside the caller's bf16 autocast
    rows_per_user: int = (
        1  # example i is a person with 1 + i mod so many rows, all alike, so that their mean is one of them
    )

    def __post_init__(self) -> None:
        check_path(self.path)
        if isinstance(self.method, str) and self.method not in METHODS:
            raise bad("method", self.method, "is not a known method", f"Use one of {', '.join(map(repr, METHODS))}")
        if self.stacked and not isinstance(self.method, str):
            raise bad(
                "method", self.method, f"cannot be stacked on path={self.path!r}", "Name a method, or use another path"
            )
        if self.views > 1 and self.path not in VARIED_PATHS:
            fix = f"Use one of {', '.join(map(repr, VARIED_PATHS))}"
            raise bad("views", self.views, f"is not for path={self.path!r}", fix)
        if self.rows_per_user > 1 and self.path not in PEOPLE_PATHS:
            fix = f"Use one of {', '.join(map(repr, PEOPLE_PATHS))}"
            raise bad("rows_per_user", self.rows_per_user, f"is not for path={self.path!r}", fix)
        if self.stacked and self.views > 1 and self.inputs.dim() != 4:
            problem = f"are of images on path={self.path!r}, and the inputs have shape {tuple(self.inputs.shape)}"
            raise bad(
                "views", self.views, problem, "Give inputs of shape [N, channels, height, width], or another path"
            )
        if len(self.inputs) != len(self.labels) or len(self.inputs) < 4:
            raise bad("data", (len(self.inputs), len(self.labels)), "is too small", "Give at least 4 labelled examples")

    def rows_of(self, example: int) -> int:
        """How many rows an example has, where it is a person."""
        return 1 + example % self.rows_per_user

    @property
    def stacked(self) -> bool:
        return self.path in STACK_PATHS

    @property
    def name(self) -> str:
        return self.method if isinstance(self.method, str) else getattr(self.method, "__name__", "own optimizer")

    def build(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def but(self, **changes: Any) -> Subject:
        return replace(self, **changes)

    def around_a_step(self) -> AbstractContextManager[Any]:
        """What the caller has switched on while a step is made."""
        return torch.autocast(self.inputs.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def silent_loss(self) -> Subject:
        """The same, with a loss that has no gradient: a release is then all noise."""
        loss = self.loss
        return self.but(loss=lambda outputs, labels: 0.0 * loss(outputs, labels))


@dataclass(frozen=True)
class Finding:
    """What one check says.

    Attributes:
        check: its name.
        holds: whether the claim holds; None where the check does not apply.
        detail: what was measured, or why it does not apply.
        power: what the check can see.
    """

    check: str
    holds: bool | None
    detail: str
    power: str = ""


@dataclass(frozen=True)
class Check:
    """A check by its name, and the tier it belongs to. It returns (holds, detail)."""

    name: str
    tier: str
    question: str
    run: Callable[[Subject], Verdict]
    power: str = ""

    def __call__(self, subject: Subject) -> Finding:
        """An error of any kind is a failure: a check that cannot be finished shows nothing."""
        try:
            holds, detail = self.run(subject)
        except Exception as error:
            holds, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return Finding(self.name, holds, detail, self.power)


class Tier(list[Check]):
    """Checks of one kind: A deterministic, B statistical, C by attack."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self.letter = letter

    def asks(self, question: str, power: str) -> Callable[[Callable[[Subject], Verdict]], Check]:
        """A decorator that makes a function a check of this tier, under the function's name."""

        def make(function: Callable[[Subject], Verdict]) -> Check:
            self.append(Check(function.__name__.replace("_", " "), self.letter, question, function, power))
            return self[-1]

        return make


#: Stands in for the noise: (shape and dtype to fill, σC) → noise. None leaves the path's own noise in place.
Answer = Callable[[Tensor, float], Tensor]


def silence(like: Tensor, std: float) -> Tensor:
    return torch.zeros_like(like)


def one_std(like: Tensor, std: float) -> Tensor:
    return torch.full_like(like, std)


def drowned(batch: float, bound: float) -> Answer:
    """Noise so large that in fp32 a few gradients of that norm vanish in it: every coordinate of g_dp is 2²³ of it."""
    return lambda like, std: torch.full_like(like, batch * bound * 2.0**23)


@dataclass(frozen=True)
class Observed:
    """One release of one run."""

    released: Tensor  # g_dp, flat, in double: what the optimizer got
    variance: float  # of the noise in it, as stated to the optimizer
    theta: list[Tensor]  # where gradients were taken
    draws: int  # of θ, in this step


class Session:
    """One or several runs of a path. Row indices point into the subject's data. Each path has its subclass."""

    step: Callable[[Sequence[int]], Observed]
    step_in_parts: Callable[
        [Sequence[int]], list[Observed]
    ]  # a batch too large to be computed at once; all its releases
    spec: Callable[[], NoiseSpec]
    accountant: Callable[[], Accountant]
    sampled: Callable[[int], list[list[int]]]  # so many batches as the path draws them
    train: Callable[[int], None]  # on so many batches as the path draws them
    state: Callable[[], list[Tensor]]  # all that was learned: parameters, the optimizer's state, the posterior
    network_as_trained: Callable[[], nn.Module]  # a copy of what a method trains, which may not be what it was given
    means: Callable[[], Tensor]  # the trained parameters, flat

    def __init__(self, subject: Subject, setting: Setting, answer: Answer | None) -> None:
        self.subject, self.setting, self.answer = subject, setting, answer
        self.charged: list[int] = []  # releases that were charged when noise was drawn, one entry per draw

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        """Sum a part of a batch and abandon it; False where a path cannot be left so."""
        return False

    def rebound(self, bound: float) -> bool:
        """Change C between two releases; False where it is fixed."""
        return False

    def renoise(self, sigma: float) -> bool:
        """Change σ between two releases; False where it is fixed."""
        return False


def start(subject: Subject, setting: Setting, answer: Answer | None = None) -> Any:
    """A fresh :class:`Session` of the subject. Equal settings give equal random streams."""
    from dpivon.audit.compiled_session import CompiledSession
    from dpivon.audit.distributed_session import DistributedSession
    from dpivon.audit.engine_session import EngineSession
    from dpivon.audit.stack_session import StackSession

    kinds: dict[str, type[Session]] = {
        "stacked": StackSession,
        "captured": StackSession,
        "distributed": DistributedSession,
        "compiled": CompiledSession,
    }
    return kinds.get(subject.path, EngineSession)(subject, setting.but(seed=setting.seed + subject.seed), answer)


def side_by_side(subject: Subject, setting: Setting, batches: Sequence[Sequence[int]]) -> list[Tensor]:
    """b·g_dp without noise of each batch, every one the first step of the same run: the clipped sums at one θ."""
    if subject.path == "distributed":  # in the same processes, which are dear to start
        ranks = start(subject, setting, silence)
        return [ranks.fresh_step(rows).released * setting.batch for rows in batches]
    if not subject.stacked:
        return [start(subject, setting, silence).step(rows).released * setting.batch for rows in batches]
    session = start(subject, setting.but(runs=len(batches), twins=True), silence)
    mask = torch.zeros(len(batches), len(subject.inputs))
    for k, rows in enumerate(batches):
        mask[k, list(rows)] = 1
    return list(session.all_runs(mask) * setting.batch)


# ---- the definition: one example after the other, in double


def gradients(subject: Subject, theta: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """∇ℓ_i at θ for every row, [B, P], in double."""
    model = copy.deepcopy(subject.model).double()
    params = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, value in zip(params, theta, strict=True):
            p.copy_(value)
    x, y = subject.inputs, subject.labels
    x = x.double() if x.is_floating_point() else x
    out = torch.zeros(len(rows), sum(p.numel() for p in params), dtype=torch.float64)
    for row, i in zip(out, rows, strict=True):
        loss = subject.loss(model(x[i : i + 1]), y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, params, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
        row.copy_(torch.cat([g.flatten() for g in flat]))
    return out


def clipped(rows: Tensor, bound: float) -> Tensor:
    """g_i · min(1, C/‖g_i‖)."""
    return rows * (bound / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)


def clipped_sum(subject: Subject, seen: Observed, rows: Sequence[int], bound: float) -> Tensor:
    """Of these examples, at the θ of what was seen."""
    return clipped(gradients(subject, seen.theta, rows), bound).sum(0)


def unknown(subject: Subject) -> str:
    """Why the definition cannot be held against a run to rounding; empty where it can."""
    if subject.autocast and not subject.stacked:  # a stack has a precision of its own
        return "autocast rounds the forward pass, so the definition, in double, is another number"
    return "the forward pass is random, so the definition cannot be evaluated beside it" if is_random(subject) else ""


def is_random(subject: Subject) -> bool:
    """Whether two training passes over one batch differ, as with dropout or layers that draw their weights."""
    model = start(subject, Setting(), silence).network_as_trained().train()
    x = subject.inputs[:2]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return any(not torch.equal(model(x), model(x)) for _ in range(3))
