"""The samples of a Markov chain that are kept: after burn-in, thinned, and never more than fit the memory they may have.

One in ``interval`` iterates is kept. When there are more than there is room for, every second one goes and the interval
doubles, so that what is kept is spread evenly over the whole chain after burn-in, however long it turns out to be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpivon.errors import bad, check_number, check_whole

Sample = dict[int, Tensor]


class Chain:
    """Kept iterates, each a set of tensors by position, on the CPU.

    Args:
        burn_in: below 1, the share of all steps so far whose iterates are left out; otherwise a number of steps.
        thinning: the first interval between kept iterates.
        max_samples: how many are kept at most.
        max_bytes: and how much memory they may take.
    """

    def __init__(
        self, *, burn_in: float = 0.5, thinning: int = 1, max_samples: int = 64, max_bytes: int = 2**28
    ) -> None:
        burn_in = check_number("burn_in", burn_in, "Use a share such as 0.5 or a number of steps", at_least=0.0)
        if burn_in >= 1.0:
            burn_in = check_whole("burn_in", burn_in, "Use a share below 1, or a whole number of steps", at_least=1)
        self.burn_in = burn_in
        self.interval = check_whole("thinning", thinning, "Use 1 to keep every iterate", at_least=1)
        self.max_samples = check_whole("max_samples", max_samples, "Keep at least 2 samples", at_least=2)
        self.max_bytes = check_whole("max_bytes", max_bytes, "Use a number of bytes such as 2**28", at_least=1)
        self.steps = 0
        self.kept: dict[int, Sample] = {}  # by the step after which they were taken

    def __len__(self) -> int:
        return len(self.samples())

    def room(self, sample: Sample) -> int:
        """How many samples of this size may be kept."""
        each = sum(t.numel() * t.element_size() for t in sample.values())
        room = min(self.max_samples, self.max_bytes // each)
        if room < 2:
            fix = f"Allow at least {2 * each}, or collect fewer parameters"
            raise bad("max_bytes", self.max_bytes, f"is too little for two samples of {each} bytes", fix)
        return room

    def due(self) -> bool:
        """Count a step; True when its iterate is one to keep."""
        self.steps += 1
        return self.steps % self.interval == 0 and self.steps > self._burnt()

    def add(self, sample: Sample) -> None:
        room = self.room(sample)
        self.kept = self.samples()  # what has become part of the burn-in is of no more use
        self.kept[self.steps] = sample
        while len(self.kept) > room:
            self.interval *= 2
            self.kept = {step: s for step, s in self.kept.items() if step % self.interval == 0}

    def samples(self) -> dict[int, Sample]:
        """The samples after burn-in, by step."""
        return {step: sample for step, sample in self.kept.items() if step > self._burnt()}

    def _burnt(self) -> float:
        return self.burn_in * self.steps if self.burn_in < 1.0 else self.burn_in

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, one stacked tensor a parameter."""
        times = sorted(self.kept)
        stacked = {i: torch.stack([self.kept[t][i] for t in times]) for i in (self.kept[times[0]] if times else {})}
        return {"steps": self.steps, "interval": self.interval, "times": times, "samples": stacked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.interval = int(state["steps"]), int(state["interval"])
        stacked = state["samples"]
        self.kept = {
            int(t): {int(i): values[k].detach().cpu().clone() for i, values in stacked.items()}
            for k, t in enumerate(state["times"])
        }
