"""Downloads from an address of our own: checked, whole or not at all."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from dpivon.data import fetch as module
from dpivon.data.fetch import Source, fetch
from dpivon.data.images import DataSet, Images
from dpivon.errors import ArgumentError, DpivonError


def source(tmp_path, md5):
    def load(folder):
        pixels = np.frombuffer((folder / "d.bin").read_bytes(), np.uint8)
        images = Images(pixels, pixels)
        return DataSet("d", images, images, True)

    (tmp_path / "server.bin").write_bytes(b"content")
    return Source({"d.bin": ((tmp_path / "server.bin").as_uri(), md5)}, load)


def test_a_download_is_checked_and_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(module.SOURCES, "d", source(tmp_path, hashlib.md5(b"content").hexdigest()))
    said = []
    data = fetch("d", tmp_path / "to", said.append)
    assert data.train.pixels.tobytes() == b"content"
    (tmp_path / "server.bin").unlink()
    fetch("d", tmp_path / "to", said.append)  # the second time nothing is fetched
    assert said[-1].endswith("is there")


def test_a_wrong_or_missing_file_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(module.SOURCES, "d", source(tmp_path, "0" * 32))
    with pytest.raises(ArgumentError, match=r"is not that of d.bin"):
        fetch("d", tmp_path / "to", str)
    assert list((tmp_path / "to").iterdir()) == []
    (tmp_path / "server.bin").unlink()
    with pytest.raises(DpivonError, match=r"cannot be fetched.*put it into"):
        fetch("d", tmp_path / "to", str)
    with pytest.raises(ArgumentError, match="'cifar10'"):
        fetch("imagenet", tmp_path / "to", str)


def test_published_sums():
    assert module.SOURCES["cifar10"].files["cifar-10-binary.tar.gz"][1] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert module.SOURCES["cifar10-python"].files["cifar-10-python.tar.gz"][1] == "c58f30108f718f92721af3b95e74349a"
