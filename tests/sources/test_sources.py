"""Tables, images and arrays: the same rows however they are stored, and refusals in one sentence."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clinic import HEADER, rows, write_csv
from dpivon import ArgumentError, DpivonError
from dpivon.sources import kind_of, source_for
from dpivon.sources.arrays import Arrays, example_shape
from dpivon.sources.columns import Categorical, Numeric
from dpivon.sources.images import Images
from dpivon.sources.table import Table, column_names

TABLE = Table(
    columns={
        "sex": Categorical(categories=("f", "m")),
        "age": Numeric(min=0, max=100),
        "dose": Numeric(min=0, max=10),
    },
    target="ill",
)
CLASSES = ("yes", "no")


def test_a_table_is_its_columns_in_the_declared_order(tmp_path: Path) -> None:
    table = rows(7)
    read = TABLE.read(str(write_csv(tmp_path / "a.csv", table)), CLASSES)
    assert TABLE.shape == tuple(read.inputs.shape[1:]) == (4 + 2 + 2,)
    for row, x, y in zip(table, read.inputs.tolist(), read.targets.tolist(), strict=True):
        expected = [float(row[2] == "f"), float(row[2] == "m"), 0, 0, row[0] / 50 - 1, 0, row[1] / 5 - 1, 0]
        assert x == pytest.approx(expected, abs=1e-6)
        assert CLASSES[y] == row[4]


def test_parquet_and_csv_are_the_same_to_the_bit(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = [*rows(20), [None, 3.0, None, None, "yes"]]
    write_csv(tmp_path / "a.csv", table)
    columns = {name: [row[i] for row in table] for i, name in enumerate(HEADER)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    one, other = (TABLE.read(str(tmp_path / name), CLASSES) for name in ("a.csv", "a.parquet"))
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.targets, other.targets)
    assert column_names(tmp_path / "a.parquet") == HEADER


def test_a_byte_order_mark_and_another_delimiter_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("﻿age;ill\n3;yes\n\n".encode())
    table = Table(columns={"age": Numeric(min=0, max=6)}, target="ill", delimiter=";")
    assert table.read(str(tmp_path / "a.csv"), CLASSES).inputs.tolist() == [[0.0, 0.0]]


def test_an_id_is_carried_and_never_an_input(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("who,age,ill\n007,3,yes\n,0,no\n")
    declared = {"columns": {"age": Numeric(min=0, max=6)}, "target": "ill"}
    source = source_for(str(tmp_path / "a.csv"), id="who", **declared)
    read = source.read(str(tmp_path / "a.csv"), CLASSES)
    assert read.inputs.tolist() == [[0.0, 0.0], [-1.0, 0.0]]
    assert read.ids == ["007", ""]
    assert read.names == ["1", "2"]
    with pytest.raises(ArgumentError, match=r"columns='who'.*--id who"):
        source_for(str(tmp_path / "a.csv"), **declared)
    with pytest.raises(ArgumentError, match="id='age': is the target or a declared column"):
        source_for(str(tmp_path / "a.csv"), id="age", **declared, ignore=("who",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"age,ill\n3,yes\n4\n", "row 2 has 1 cells and the header 2"),
        (b"age,ill\n3,maybe\n", "the label 'maybe' of row 1 is not among them"),
        (b"age,ill\n3,\n2,no\n", "1 of 2 labels are missing, the first in row 1"),
        (b"age;ill\n3;yes\n", "delimiter=',': leaves the header of .* in one piece, 'age;ill'. State --delimiter ';'"),
        (b"dose,ill\n3,yes\n", "has no column 'age'"),
        (b"age,age\n3,yes\n", "a column name 'age' twice or empty"),
        (b"", "has no header"),
        (b"age,ill\n", "holds no examples"),
        (b"age,ill\n\xff\xfe,yes\n", "encoding='utf-8-sig': is not that of .*--encoding cp1252"),
        (b'age,ill\n"3,yes\n', "cannot be read as CSV"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    table = Table(columns={"age": Numeric(min=0, max=6)}, target="ill")
    with pytest.raises(ArgumentError, match=words) as caught:
        table.read(str(tmp_path / "a.csv"), CLASSES)
    assert "\n" not in str(caught.value)


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ArgumentError, match="cannot be read as Parquet"):
        TABLE.read(str(tmp_path / "a.parquet"), CLASSES)


# ---- images


def write_image(path: Path, value: object, mode: str = "L", size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_images_are_brought_to_the_declared_size_and_scaled_by_constants(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "1.png", 255, size=(30, 50))
    write_image(tmp_path / "cat" / "2.JPG", 0)
    write_image(tmp_path / "dog" / "1.png", (255, 0, 51), "RGB")
    for left_behind in (".hidden", ".DS_Store", "Thumbs.db"):
        (tmp_path / "cat" / left_behind).touch()
    (tmp_path / "Thumbs.db").touch()
    source = Images(size=6, channels=3)
    read = source.read(str(tmp_path), ("dog", "cat", "bird"))
    assert read.names == ["cat/1.png", "cat/2.JPG", "dog/1.png"]
    assert read.targets.tolist() == [1, 1, 0]
    assert tuple(read.inputs.shape[1:]) == source.shape == (3, 6, 6)
    assert read.inputs.amin((2, 3)).tolist() == [[1, 1, 1], [-1, -1, -1], pytest.approx([1, -1, 51 / 127.5 - 1])]
    assert read.images.shape == (3, 6, 6, 3)
    grey = Images(size=6, channels=1).read(str(tmp_path), None)
    assert tuple(grey.inputs.shape) == (3, 1, 6, 6)
    assert grey.targets is None
    assert Images(size=6).read(str(tmp_path / "cat" / "1.png"), None).names == ["1.png"]


def test_an_image_is_read_the_same_whatever_else_is_in_the_folder(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)
    for folder in ("a", "b"):
        write_image(tmp_path / folder / "cat" / "1.png", 0)
        Image.fromarray(noise).save(tmp_path / folder / "cat" / "2.png")
    write_image(tmp_path / "b" / "cat" / "0.png", 255, size=(200, 3))
    one, other = (Images(size=8).read(str(tmp_path / folder), ("cat", "dog")) for folder in "ab")
    assert torch.equal(one.inputs, other.inputs[1:])


def test_images_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    source, classes = Images(size=8), ("cat", "dog")

    def refused(words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            source.read(str(tmp_path), classes)

    refused("holds no examples")
    write_image(tmp_path / "bird" / "1.png", 0)
    refused("the label 'bird' of a folder")
    (tmp_path / "bird").rename(tmp_path / "cat")
    (tmp_path / "cat" / "2.png").write_bytes(b"GIF89a")
    refused("cannot be read as an image")
    (tmp_path / "cat" / "2.png").unlink()
    (tmp_path / "cat" / "2.gif").touch()
    refused("is neither PNG nor JPEG")
    (tmp_path / "cat" / "2.gif").unlink()
    Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(tmp_path / "cat" / "deep.png")
    refused("more than 8 bits per channel")
    (tmp_path / "cat" / "deep.png").unlink()
    write_image(tmp_path / "3.png", 0)
    refused("holds 3.png, which is in no class")


# ---- arrays


def test_arrays_are_clamped_scaled_and_marked_where_missing(tmp_path: Path) -> None:
    x = np.array([[0.0, 16.0], [8.0, 99.0], [np.nan, -np.inf]])
    np.savez(tmp_path / "a.npz", x=x, y=np.array(["b", "a", "b"]))
    source = Arrays(sizes=example_shape(str(tmp_path / "a.npz")), bounds=Numeric(min=0, max=16))
    read = source.read(str(tmp_path / "a.npz"), ("a", "b"))
    assert read.inputs.tolist() == [[-1, 1, 0, 0], [0, 1, 0, 0], [0, -1, 1, 0]]
    assert read.targets.tolist() == [1, 0, 1]
    assert source.shape == (4,)


def test_an_archive_of_data_and_labels_is_one_of_x_and_y(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", data=np.array([[0.0], [16.0]]), labels=np.array([1, 0]), names=np.array(["f"], dtype=object)
    )
    source = Arrays(sizes=example_shape(str(tmp_path / "a.npz")), bounds=Numeric(min=0, max=16))
    read = source.read(str(tmp_path / "a.npz"), ("0", "1"))
    assert (read.inputs.tolist(), read.targets.tolist()) == ([[-1, 0], [1, 0]], [1, 0])


@pytest.mark.parametrize(("shape", "inputs"), [((3, 8, 8), (1, 8, 8)), ((3, 2, 8, 8), (2, 8, 8))])
def test_two_files_and_images_in_them(tmp_path: Path, shape: tuple[int, ...], inputs: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, dtype=np.uint8))
    np.save(tmp_path / "y.npy", np.array([0, 1, 1]))
    where = f"{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}"
    assert kind_of(where) == "array"
    source = Arrays(sizes=example_shape(where), bounds=Numeric(min=0, max=255))
    read = source.read(where, ("0", "1"))
    assert source.shape == tuple(read.inputs.shape[1:]) == inputs
    assert read.targets.tolist() == [0, 1, 1]
    assert source.read(str(tmp_path / "x.npy"), None).targets is None


def test_arrays_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    source = Arrays(sizes=(2,), bounds=Numeric(min=0, max=1))

    def refused(words: str, classes: tuple[str, ...] | None = ("0", "1"), **arrays: np.ndarray) -> None:
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(ArgumentError, match=words):
            source.read(str(tmp_path / "a.npz"), classes)

    x = np.zeros((3, 2))
    refused("holds no y", x=x)
    refused("holds no x, but 'pixels', 'y'. Give an .npz with x and y .or data and labels", pixels=x, y=np.zeros(3))
    refused("shape \\(3, 3\\)|of shape \\(3,\\)", x=np.zeros((3, 3)), y=np.zeros(3))
    refused("labels of shape", x=x, y=np.zeros(4))
    refused("the label 2 of row 3", x=x, y=np.array([0, 1, 2]))
    refused("not of numbers", x=np.full((3, 2), "a"), y=np.zeros(3))
    refused("cannot be read as arrays", x=np.array([[object()] * 2] * 3), y=np.zeros(3))
    refused("holds no examples", x=x[:0], y=np.zeros(0))
    np.savez(tmp_path / "flat.npz", x=np.zeros(3))
    with pytest.raises(ArgumentError, match="x has shape"):
        example_shape(str(tmp_path / "flat.npz"))
    with pytest.raises(ArgumentError, match="is of no kind that is known"):
        kind_of(str(tmp_path / "a.xls"))
    with pytest.raises(ArgumentError, match="does not exist"):
        kind_of(str(tmp_path / "none.csv"))


# ---- damaged files


def files() -> dict[str, bytes]:
    """One whole file of each kind."""
    made = {"csv": b"age,ill\n3,yes\n4,no\n"}
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8))
    for suffix, kind in (("png", "PNG"), ("jpg", "JPEG")):
        out = io.BytesIO()
        pixels.save(out, kind)
        made[suffix] = out.getvalue()
    for suffix, save in (("npz", np.savez), ("packed.npz", np.savez_compressed)):
        out = io.BytesIO()
        save(out, x=np.zeros((3, 2)), y=np.arange(3) % 2)
        made[suffix] = out.getvalue()
    out = io.BytesIO()
    np.save(out, np.zeros((3, 2)))
    return made | {"npy": out.getvalue()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", files())
def test_a_damaged_file_is_read_or_refused_and_never_a_traceback(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(0)
    sources = {
        "csv": (Table(columns={"age": Numeric(min=0, max=6)}, target="ill"), CLASSES),
        "npy": (Arrays(sizes=(2,), bounds=Numeric(min=0, max=1)), None),
        "npz": (Arrays(sizes=(2,), bounds=Numeric(min=0, max=1)), ("0", "1")),
    }
    source, classes = sources.get(suffix.split(".")[-1], (Images(size=8), None))
    path, refused = tmp_path / f"a.{suffix}", 0
    for _ in range(150):
        content = bytearray(files()[suffix])
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(content))
            if draw.random() < 0.8:
                content[at] = draw.randrange(256)
            else:
                del content[max(1, at) :]
        path.write_bytes(content)
        try:
            source.read(str(path), classes)
        except DpivonError:
            refused += 1
    assert refused > 20


def test_a_source_is_made_from_a_path_and_what_is_declared(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(12.0).reshape(3, 4), y=np.array([0, 1, 1]))
    where = str(tmp_path / "a.npz")
    source = source_for(where, value_bounds=Numeric(min=0, max=11))
    examples = source.read(where, ("0", "1"))
    assert examples.inputs.shape == (3, *source.shape)
    assert examples.targets is not None
    assert examples.targets.tolist() == [0, 1, 1]
    with pytest.raises(ArgumentError, match="bounds=None"):
        source_for(where)
    with pytest.raises(ArgumentError, match=r"target='y'.*no meaning for arrays"):
        source_for(where, target="y", value_bounds=Numeric(min=0, max=11))
    (tmp_path / "t.csv").write_text("age,ill\n3,no\n4,yes\n")
    table = source_for(str(tmp_path / "t.csv"), columns={"age": Numeric(min=0, max=10)}, target="ill")
    assert table.read(str(tmp_path / "t.csv"), ("no", "yes")).targets.tolist() == [0, 1]  # type: ignore[union-attr]
    with pytest.raises(ArgumentError, match=r"columns='age'.*neither range nor categories"):
        source_for(str(tmp_path / "t.csv"), target="ill")
