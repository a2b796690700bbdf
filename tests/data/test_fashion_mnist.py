"""IDX files, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib

import numpy as np
import pytest
from archives import idx

from dpivon.data import fashion_mnist, load_fashion_mnist
from dpivon.errors import ArgumentError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "SIZES", {"train": 20, "t10k": 10})
    rng = np.random.default_rng(0)
    for part, n in (("train", 20), ("t10k", 10)):
        arrays = {
            f"{part}-images-idx3-ubyte": rng.integers(0, 256, (n, 28, 28), np.uint8),
            f"{part}-labels-idx1-ubyte": np.arange(n, dtype=np.uint8) % 10,
        }
        for name, array in arrays.items():
            (tmp_path / name).write_bytes(idx(array))
    return tmp_path


def zipped(folder):
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def test_zipped_and_plain_are_the_same_and_unverified_unless_published(folder, monkeypatch):
    plain = load_fashion_mnist(folder)
    assert plain.train.pixels.shape == (20, 28, 28, 1)
    assert sorted(plain.train.labels.tolist()) == sorted([*range(10)] * 2)
    zipped(folder)
    packed = load_fashion_mnist(folder)
    assert np.array_equal(plain.train.pixels, packed.train.pixels)
    assert np.array_equal(plain.test.labels, packed.test.labels)
    assert not packed.verified
    published = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    monkeypatch.setattr(fashion_mnist, "MD5", published)
    assert load_fashion_mnist(folder).verified


def test_damage_is_refused_with_words(folder):
    images = folder / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for content, words in ((whole[:-1], "bytes for a shape"), (b"PK" + whole, "not an IDX file"), (b"", "not an IDX")):
        images.write_bytes(content)
        with pytest.raises(ArgumentError, match=words):
            load_fashion_mnist(folder)
    images.write_bytes(whole)
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(20, np.uint8)))
    with pytest.raises(ArgumentError, match="images per class"):
        load_fashion_mnist(folder)
    labels.unlink()
    with pytest.raises(ArgumentError, match=r"lacks train-labels.*dataset-fashion-mnist"):
        load_fashion_mnist(folder)
    zipped(folder)
    images = folder / "t10k-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:50])
    with pytest.raises(ArgumentError):
        load_fashion_mnist(folder)
