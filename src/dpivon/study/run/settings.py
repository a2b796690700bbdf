"""How to run a study, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST = 90  # runs that a GPU trains at once by default


@dataclass(frozen=True)
class Settings:
    """How to run, none of which changes what is run.

    Attributes:
        device: "cuda", "cpu", or None for what there is.
        stack: runs to train at once; by default 90 on a GPU and 1 elsewhere.
        precision: "float32" or "bfloat16"; by default the latter on a GPU. Norms and sums are in fp32 and fp64 always.
        minutes: stop at a checkpoint, or between two runs that are evaluated, when so much time has passed.
        checkpoint_seconds: about how much work a crash may lose, and how many releases it charges again; evaluation included.
        block: steps that a stack draws and charges at once.
        keep: save the posterior of every finished run under OUT/posteriors.
        only: run only what has this in its id, such as "b512-": several machines can share a plan.
    """

    data: Path = Path("data")
    device: str | None = None
    stack: int | None = None
    precision: str | None = None
    minutes: float | None = None
    checkpoint_seconds: float = 60.0
    block: int = 32
    keep: bool = False
    quiet: bool = False
    only: str = ""


@dataclass(frozen=True)
class Cluster:
    """Where the Ray engine runs a study; None is its own choice.

    Attributes:
        address: of a Ray cluster that this machine is a node of, such as "auto"; by default one is started here and stopped
            again.
        workers: stacks at once; by default as many as the cluster's GPUs, or CPU cores, hold when it starts.
        gpus_per_stack: the share of a GPU that a stack takes, by default 1; half lets two share one.
        retries: how often a stack that failed without getting further is begun again, by default 3.
        hung_after: seconds without a word from a worker after which it is ended like a lost one, by default 1800: a block, an
            evaluation or a compilation must not take longer.
        scratch: a folder on the workers' own disks to keep stacks in, where they do not see OUT.
    """

    address: str | None = None
    workers: int | None = None
    gpus_per_stack: float | None = None
    retries: int | None = None
    hung_after: float | None = None
    scratch: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How many of the plan's runs are finished, which signal stopped the others, which were given up and why, and how many are
    left of those that were asked for; without a number, all that are not finished."""

    finished: int
    planned: int
    signal: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    left: int | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal; 1 if runs were given up; otherwise 75 (EX_TEMPFAIL: run it again to go on) or 0."""
        if (self.planned - self.finished if self.left is None else self.left) == 0:
            return 0
        return 128 + self.signal if self.signal else 1 if self.failed else 75

    def lines(self, path: Path) -> list[str]:
        """In words, for people."""
        given_up = [f"given up: {run}: {reason}" for run, reason in self.failed.items()]
        return [*given_up, f"{self.finished} of {self.planned} runs finished, in {path}"]
