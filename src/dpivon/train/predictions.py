"""``predictions.csv``: one line per example, with the probability of every class and how uncertain the model is.

Names of files and classes that a spreadsheet would execute stand after an apostrophe.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from dpivon.csv_cells import cell
from dpivon.durable.files import replace
from dpivon.errors import bad
from dpivon.predict import ClassPrediction
from dpivon.train.published import Published
from dpivon.train.sources import kind_of


def predict_file(
    published: Published, where: str, out: Path, *, samples: int | None = None, seed: int = 0
) -> ClassPrediction:
    """Read and encode ``where`` as the model's own data was, predict, and write a CSV. Spends no privacy."""
    source = published.description.inputs
    if (kind := kind_of(where)) != source.kind:
        raise bad("data", where, f"is of the kind {kind}, and the model takes {source.told()}", "Give data like it")
    if not out.parent.is_dir():
        raise bad("out", str(out), "is in a folder that does not exist", "Create the folder first")
    examples = source.read(where, None)
    found = published.predict(examples.inputs, samples, seed)
    classes = published.description.classes
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = "file" if kind == "image" else "row"
    writer.writerow([first, "predicted", *(f"p({name})" for name in classes), "entropy", "mutual_information"])
    rows = zip(
        examples.names,
        found.label.tolist(),
        found.probs.tolist(),
        found.entropy.tolist(),
        found.mutual_information.tolist(),
        strict=True,
    )
    for name, label, probs, entropy, information in rows:
        numbers = (f"{value:.9g}" for value in (*probs, entropy, information))
        writer.writerow([cell(str(name)), cell(classes[label]), *numbers])
    replace(out, text.getvalue().encode())
    return found
