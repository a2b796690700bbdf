"""What a study looks at beyond its test set, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dpivon.data.corruptions import CORRUPTIONS, SEVERITIES
from dpivon.errors import bad, check_choice, check_whole

HELD_OUT = "held-out"
OOD = ("fashion-mnist", HELD_OUT)


@dataclass(frozen=True)
class Evaluation:
    """Every corruption at every severity, every set of foreign pictures, and answers withheld if ``selective``.

    ``pictures`` is how many of the test set, and of each foreign set, are looked at; None means all. The same ones are
    looked at clean, so that nothing but the corruption differs.
    """

    corruptions: tuple[str, ...] = ()
    severities: tuple[int, ...] = ()
    ood: tuple[str, ...] = ()
    selective: bool = False
    pictures: int | None = None

    def __post_init__(self) -> None:
        for name in self.corruptions:
            check_choice("corruptions", name, tuple(CORRUPTIONS), "Name corruptions that dpivon.data.corruptions has")
        for name in self.ood:
            check_choice("ood", name, OOD, "Name sets of pictures that dpivon has")
        for severity in self.severities:
            if severity not in SEVERITIES:
                raise bad("severities", severity, "is not from 1 to 5", "Give some of 1, 2, 3, 4 and 5")
        for what in ("corruptions", "severities", "ood"):
            found = getattr(self, what)
            if len(set(found)) < len(found):
                raise bad(what, list(found), "names something twice", "Name each once")
        if bool(self.corruptions) != bool(self.severities):
            fix = "Give both or neither"
            raise bad("corruptions", list(self.corruptions), f"does not go with severities={self.severities}", fix)
        if not isinstance(self.selective, bool):
            raise bad("selective", self.selective, "is neither true nor false", "Say whether answers may be withheld")
        if self.pictures is not None:
            check_whole("pictures", self.pictures, "Give how many test pictures to look at", at_least=20)
