"""What a stack is doing, for whoever asks from another process: ``dpivon study status``."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from dpivon.durable.files import replace
from dpivon.errors import StorageError

NOTE = "now.json"
_EVERY = 2.0  # seconds


class Note:
    """Kept in the stack's folder, and written no more often than people look."""

    def __init__(self, folder: Path) -> None:
        self.path, self._last = folder / NOTE, float("-inf")

    def write(self, words: str) -> None:
        if time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            with contextlib.suppress(StorageError):  # no study ends for want of a note
                replace(self.path, json.dumps({"words": words, "time": time.time()}).encode())


def noted(folder: Path) -> str:
    """The last note with its age; nothing where there is none that can be read."""
    try:
        found = json.loads((folder / NOTE).read_text())
        return f"{max(0, round(time.time() - found['time']))} s ago: {found['words']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
