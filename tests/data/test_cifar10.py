"""CIFAR-10 from either official version; damaged, foreign and hostile files are refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from archives import batch_pickle, binary, pictures, tar

from dpivon.data import Images, cifar10, digest, load_cifar10, normalised, tuning_split
from dpivon.data.cifar10 import read_pickle
from dpivon.errors import ArgumentError

SHARED = Path(__file__).parents[2] / "../shared/data/cifar10"
REAL = Path(os.environ.get("DPIVON_CIFAR10", SHARED))


@pytest.fixture
def small(monkeypatch):
    """Ten training and four test pictures that pass for the published ones."""
    x, y = pictures(14)
    train, test = Images(cifar10._rows(x[:10]), y[:10]), Images(cifar10._rows(x[10:]), y[10:])
    monkeypatch.setattr(cifar10, "TRAIN", 10)
    monkeypatch.setattr(cifar10, "TEST", 4)
    monkeypatch.setattr(cifar10, "TRAIN_DIGEST", digest(train))
    monkeypatch.setattr(cifar10, "TEST_DIGEST", digest(test))
    return x, y


def files(x, y, encode, suffix="", order=range(10)):
    order = list(order)
    out = {f"data_batch_{i + 1}{suffix}": encode(x[o], y[o]) for i in range(5) for o in [order[2 * i : 2 * i + 2]]}
    return out | {f"test_batch{suffix}": encode(x[10:], y[10:])}


def put(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


LAYOUTS = {
    "bin": (binary, ".bin", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    "py": (batch_pickle, "", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["folder", "inside", "archive", "archive itself"])
def test_every_official_form_gives_the_same_pictures(small, tmp_path, layout, form):
    x, y = small
    encode, suffix, folder, archive = LAYOUTS[layout]
    contents = files(x, y, encode, suffix, order=reversed(range(10)))  # another order than the digest's
    if form.startswith("archive"):
        (tmp_path / archive).write_bytes(tar({f"{folder}/{n}": c for n, c in contents.items()}))
    else:
        put(tmp_path / folder, contents)
    root = tmp_path / {"inside": folder, "archive itself": archive}.get(form, "")
    data = load_cifar10(root)
    assert data.verified
    # every record is there with its own label, whatever the order
    records = {p.tobytes(): int(label) for p, label in zip(data.train.pixels, data.train.labels, strict=True)}
    assert records == {p.tobytes(): int(label) for p, label in zip(cifar10._rows(x[:10]), y[:10], strict=True)}
    which = [p.tobytes() for p in cifar10._rows(x)].index(data.train.pixels[0].tobytes())
    assert data.train.pixels[0, 0, 1, 2] == x[which, 2 * 1024 + 1]  # blue comes last, rows before columns


def test_two_orders_become_one(small, tmp_path):
    x, y = small
    sets = []
    for name, order in (("a", range(10)), ("b", reversed(range(10)))):
        put(tmp_path / name, files(x, y, binary, ".bin", order))
        sets.append(load_cifar10(tmp_path / name))
    assert np.array_equal(sets[0].train.pixels, sets[1].train.pixels)
    assert np.array_equal(sets[0].train.labels, sets[1].train.labels)


@pytest.mark.parametrize("place", ["pixel", "label", "moved between sets"])
def test_one_wrong_byte_is_refused(small, tmp_path, place):
    x, y = (a.copy() for a in small)
    if place == "pixel":
        x[3, 100] ^= 1
    elif place == "label":
        y[3] = (y[3] + 1) % 10
    else:
        x[[0, 10]], y[[0, 10]] = x[[10, 0]], y[[10, 0]]
    put(tmp_path, files(x, y, binary, ".bin"))
    with pytest.raises(ArgumentError, match=r"not those of CIFAR-10.*damaged.*dpivon data fetch cifar10"):
        load_cifar10(tmp_path)


def test_words_when_it_is_missing_cut_or_short(small, tmp_path):
    x, y = small
    with pytest.raises(ArgumentError, match=r"does not exist.*dpivon data fetch cifar10"):
        load_cifar10(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="holds no CIFAR-10"):
        load_cifar10(tmp_path)
    contents = files(x, y, binary, ".bin")
    whole = tar({f"cifar-10-batches-bin/{n}": c for n, c in contents.items()})
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArgumentError, match="not a whole archive"):
        load_cifar10(tmp_path)
    put(tmp_path / "cut", contents | {"data_batch_2.bin": contents["data_batch_2.bin"][:-1]})
    with pytest.raises(ArgumentError, match=r"data_batch_2.bin.*not a multiple of 3073"):
        load_cifar10(tmp_path / "cut")
    put(tmp_path / "short", {n: c for n, c in contents.items() if n != "data_batch_4.bin"})
    with pytest.raises(ArgumentError, match=r"lacks data_batch_4.bin"):
        load_cifar10(tmp_path / "short")
    put(tmp_path / "fewer", contents | {"data_batch_1.bin": contents["data_batch_1.bin"][:3073]})
    with pytest.raises(ArgumentError, match="9 training images instead of 10"):
        load_cifar10(tmp_path / "fewer")


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Evil.target),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(tmp_path, protocol):
    Evil.target = tmp_path / "harmed"
    program = pickle.dumps({"data": Evil(), "labels": [1]}, protocol)
    with pytest.raises(ArgumentError, match="no use for"):
        read_pickle(program, "data_batch_1")
    assert not Evil.target.exists()
    pickle.loads(program)
    assert Evil.target.exists()  # it would have


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80\x02}q\x01",
        b"\x80\x02K\x01.",
        b"cnumpy\nndarray\n)R.",  # a call that the files do not make
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        b"M\xff\xffM\xff\xff\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x01atbu.",  # one byte for 4 billion
        b"\x80\x02}(U\x04datacnumpy\ndtype\nU\x02O8K\x00K\x01\x87Ru",
    ],
)
def test_a_malformed_pickle_is_our_error(program):
    with pytest.raises(ArgumentError, match="data_batch_1"):
        read_pickle(program, "data_batch_1")


def test_the_interpreter_agrees_with_pickle_itself_on_an_honest_file():
    x, y = pictures(5)
    program = batch_pickle(x, y)
    ours = read_pickle(program, "b")
    theirs = pickle.loads(program, encoding="latin-1")
    assert ours.keys() == theirs.keys()
    assert np.array_equal(ours["data"], theirs["data"])
    assert ours["labels"] == theirs["labels"] == y.tolist()
    assert ours["filenames"] == theirs["filenames"]


def test_the_split_is_fixed_disjoint_and_whole():
    images = Images(np.arange(50_000, dtype=np.uint32).reshape(-1, 1, 1, 1), np.zeros(50_000, np.uint8))
    fit, held_out = tuning_split(images)
    a, b = set(fit.pixels.ravel().tolist()), set(held_out.pixels.ravel().tolist())
    assert (len(a), len(b)) == (45_000, 5_000)
    assert a | b == set(range(50_000))
    assert sorted(b)[:5] == FIRST_HELD_OUT


FIRST_HELD_OUT = [12, 15, 19, 61, 63]


def test_normalisation_uses_public_constants_alone():
    pixels = np.array([[[[0, 255, 51]]]], np.uint8)
    x, y = normalised(Images(pixels, np.array([3], np.uint8)))
    np.testing.assert_allclose(x.numpy().ravel(), [-2.0, 2.0, (0.2 - 0.5) / 0.25], rtol=1e-6)
    assert y.tolist() == [3]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="CIFAR-10 is not here")
def test_the_real_thing(tmp_path):
    compact = REAL / "unpack.py"  # writes the official layout from compact parts
    if compact.is_file():
        subprocess.run([sys.executable, compact, tmp_path], check=True)
    data = load_cifar10(tmp_path if compact.is_file() else REAL)
    assert data.verified
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    mean = (data.train.pixels / 255).mean((0, 1, 2))
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=5e-5)  # the published statistics
