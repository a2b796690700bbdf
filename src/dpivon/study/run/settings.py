"""How to run a study, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dpivon.errors import check_number, check_whole

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

    def __post_init__(self) -> None:
        if self.stack is not None:
            check_whole("stack", self.stack, "Give the number of runs to train at once", at_least=1)
        if self.minutes is not None:
            check_number("minutes", self.minutes, "Give the time after which to stop", above=0.0)

    def deadline(self) -> float:
        """When to stop, by the monotonic clock, if the study begins now."""
        return time.monotonic() + 60 * self.minutes if self.minutes else float("inf")


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

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_whole("workers", self.workers, "Give the number of stacks to train at once", at_least=1)
        if self.retries is not None:
            check_whole("retries", self.retries, "Give the number of new attempts at a stack that fails")
        if self.hung_after is not None:
            check_number("hung_after", self.hung_after, "Give seconds, longer than a block of steps takes", above=0.0)
        if self.gpus_per_stack is not None:
            fix = "Give the share of a GPU that a stack takes; it never uses two"
            check_number("gpus_per_stack", self.gpus_per_stack, fix, above=0.0, at_most=1.0)


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
        if self.left == 0 or self.finished == self.planned:
            return 0
        return 128 + self.signal if self.signal else 1 if self.failed else 75

    def lines(self, path: Path) -> list[str]:
        """In words, for people."""
        given_up = [f"given up: {run}: {reason}" for run, reason in self.failed.items()]
        return [*given_up, f"{self.finished} of {self.planned} runs finished, in {path}"]
