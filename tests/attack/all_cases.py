"""Every case of the matrix, by name."""

from __future__ import annotations

import importlib
from pathlib import Path

from attack_case import CASES

for _file in sorted(Path(__file__).parent.glob("cases_*.py")):
    importlib.import_module(_file.stem)

__all__ = ["CASES"]
