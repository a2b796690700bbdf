"""What is audited, by which path gradients are privatised, and what one check says of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import bad, check_choice
from dpivon.methods import METHODS
from dpivon.stacked.networks import cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]
Verdict = tuple[bool | None, str]

#: Ways from a batch to a release: book-keeping by the layers' rules, the same with layers that have none and run example by
#: example, on two processes, and two of a stack of runs ("captured" is the traced, padded program).
ENGINE_PATHS = ("bookkeeping", "alone", "distributed")
STACK_PATHS = ("stacked", "captured")
PATHS = (*ENGINE_PATHS, *STACK_PATHS)
#: Those that can average over views.
VARIED_PATHS = ("bookkeeping", "alone", *STACK_PATHS)
#: Those that can have people as the unit of privacy, and an audit of it.
PEOPLE_PATHS = ("bookkeeping", "alone")
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
