"""Files that are there whole or not at all, whenever the power fails."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpivon.errors import DpivonError, StorageError, bad

SECRET = 0o600


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yields a temporary name to write to; on leaving, the file is synced and takes ``path``'s place, and its folder is synced.

    The old file or the new one is at ``path`` at every moment. A disk that is full, or any other failure, leaves the old.
    """
    # Not tempfile: its files are private to the user, and os.replace would keep them so even where that was not asked for.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if mode is not None:  # made with its mode, not changed to it later: it is never readable by others
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error}). What was there before is intact; make room."
        ) from error
    finally:
        with suppress(OSError):  # on a read-only file system: the error above says more
            temporary.unlink(missing_ok=True)


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write ``content`` to ``path``, whole or not at all."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """A new name is on disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(name: str, path: Path, fix: str, missing: str = "") -> Any:
    """What a JSON file holds. ``name`` is the argument it was given as, ``missing`` the fix if it is not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad(name, str(path), "does not exist", missing or fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise bad(name, str(path), f"cannot be read ({error})", fix) from None
    except (ValueError, RecursionError) as error:
        raise bad(name, str(path), f"is not valid JSON ({error})", fix) from None


def check_parent(name: str, path: Path) -> None:
    """Refuse a file to be written into a folder that does not exist."""
    if not path.parent.is_dir():
        raise bad(name, str(path), "is in a folder that does not exist", "Create the folder first")


class Lock:
    """Held by one process at a time, and let go by the operating system however that process ends."""

    def __init__(self, path: Path, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise DpivonError(f"{who}: another process is using it. Wait for it, or stop it.") from None

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.release()
