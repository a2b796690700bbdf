"""What one check says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpivon.audit.subject import Subject


@dataclass(frozen=True)
class Finding:
    """``holds`` is None where the check does not apply; ``detail`` says why, or what was measured.

    ``power`` is what the check can see.
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
    run: Callable[[Subject], tuple[bool | None, str]]
    power: str = ""

    def __call__(self, subject: Subject) -> Finding:
        """An error of any kind is a failure: a check that cannot be finished shows nothing."""
        try:
            holds, detail = self.run(subject)
        except Exception as error:
            holds, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return Finding(self.name, holds, detail, self.power)
