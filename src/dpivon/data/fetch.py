"""Download a data set from its official address, for people who are online."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpivon.data.cifar10 import load_cifar10
from dpivon.data.fashion_mnist import MD5, load_fashion_mnist
from dpivon.data.images import DataSet
from dpivon.errors import DpivonError, bad, check_choice


@dataclass(frozen=True)
class Source:
    """Files with their addresses and published MD5 sums, and the reader that checks what they hold."""

    files: dict[str, tuple[str, str]]
    load: Callable[[Path], DataSet]


_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # http alone; the MD5 sums are what protects


def _cifar(file: str, md5: str) -> Source:
    return Source({file: (f"https://www.cs.toronto.edu/~kriz/{file}", md5)}, load_cifar10)


SOURCES = {
    "cifar10": _cifar("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar10-python": _cifar("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "fashion-mnist": Source({name: (_FASHION + name, md5) for name, md5 in MD5.items()}, load_fashion_mnist),
}


def fetch(name: str, to: Path, say: Callable[[str], None] = print) -> DataSet:
    """Download what is not there yet, check it, and read it whole. A damaged download leaves nothing behind."""
    source = SOURCES[check_choice("name", name, tuple(SOURCES), "Name a data set that can be fetched")]
    to.mkdir(parents=True, exist_ok=True)
    for file, (address, md5) in source.files.items():
        if (to / file).is_file():
            say(f"{to / file} is there")
            continue
        say(f"{address} → {to / file}")
        _download(address, to / file, md5)
    return source.load(to)


def _download(address: str, path: Path, md5: str) -> None:
    partial = path.with_name(path.name + ".partial")
    seen = hashlib.md5()
    try:
        with urllib.request.urlopen(address, timeout=60) as answer, partial.open("wb") as file:
            while chunk := answer.read(1 << 20):
                seen.update(chunk)
                file.write(chunk)
        if seen.hexdigest() != md5:
            raise bad("md5", seen.hexdigest(), f"is not that of {path.name}, {md5}", "Fetch it again")
        os.replace(partial, path)
    except OSError as error:
        raise DpivonError(
            f"{address}: cannot be fetched ({error}). Download it elsewhere and put it into {path.parent}."
        ) from None
    finally:
        partial.unlink(missing_ok=True)
