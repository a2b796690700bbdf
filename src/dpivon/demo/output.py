"""Where the demonstration writes, without touching anybody else's files."""

from __future__ import annotations

from pathlib import Path

from dpivon.errors import bad

MARKER = ".dpivon-demo"  # a folder with this file in it is ours to write into again


def claim(output: Path) -> Path:
    """Make the folder, or take one that is empty or was written by an earlier demonstration; refuse any other."""
    fix = "Pass another --output folder"
    try:
        if output.exists() and not output.is_dir():
            raise bad("output", str(output), "is a file", fix)
        if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
            problem = "is not empty and was not written by the demo, so its files are left alone"
            raise bad("output", str(output), problem, fix)
        output.mkdir(parents=True, exist_ok=True)
        (output / MARKER).write_text("Written by `dpivon demo`, which may overwrite its own files here.\n")
    except OSError as error:
        raise bad("output", str(output), f"cannot be written ({error.strerror})", fix) from None
    return output
